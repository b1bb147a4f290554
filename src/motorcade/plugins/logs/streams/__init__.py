"""Streams: what is published to a topic, kept in order, to be read again from any offset.

plugin     where streams meet the hooks of the broker
service    all streams of a node: declarations, what other plugins and operators may do
options    what can be set
stream     one stream: its end, its readers, the way in and out
pages      parts of streams in memory, shared by all readers; `loader` reads them
reader     one client's subscription, as a source
position   where it wants to begin
retention  what goes
views      what operators see
"""

from motorcade.plugins.logs.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.logs.streams.plugin import StreamsPlugin
from motorcade.plugins.logs.streams.service import StreamService
from motorcade.plugins.logs.streams.views import ReaderView, StreamView

__all__ = ["ReaderView", "StreamOptions", "StreamService", "StreamView", "StreamsConfig", "StreamsPlugin"]
