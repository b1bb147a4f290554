"""All rules: those of the configuration, and those created by commands, which are stored.

    records, collection `capture`    key: name of the rule, value: its options as JSON (with the URL as it was given)

Rule 1: the hook is registered with the filters of all rules, and not at all while there is none: messages that no rule
        wants stay on the broker's fast path.
Rule 2: a change is prepared, then stored, then in force; one that fails on the way changes nothing. Changes come one
        after the other.
Rule 3: a rule that is changed or removed brings what it has taken to its old target.
Rule 4: a rule of the configuration hides one of a command with the same name, as long as it is there.
Rule 5: with several nodes a message is copied by the one that its publisher is connected to, where it is published;
        what nodes relay to each other passes no hook for it. All of them have the rules of commands
        (`delivery.declarations`), each with a way of its own to the target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, cast

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.topic import matches
from motorcade.delivery.declarations import DeclarationKind, Declarations
from motorcade.extension.declared import CONFIGURED, CREATED, ConflictError, FoundMessage, UnknownError, check_name
from motorcade.extension.hooks import Handled, acknowledge_after
from motorcade.extension.plugin import Context
from motorcade.plugins.capture.metrics import OUTCOMES
from motorcade.plugins.capture.options import CaptureConfig, RuleOptions, RuleView, TargetKind, shown
from motorcade.plugins.capture.sink import BrokenSink, RuleCounts, Sink
from motorcade.plugins.capture.stream_sink import StreamSink
from motorcade.storage.ports import Store

PRIORITY: Final = -900  #: on `message.publish`: after all that may change the message
COLLECTION: Final = "capture"
KIND: Final = DeclarationKind("capture", COLLECTION, "k")
MAX_TOPICS: Final = 10_000  #: topics whose rules are cached; at the bound the cache is emptied
#: Seconds that what was taken may take to reach its target when its rule goes, and when the node stops.
LAST_ATTEMPT: Final = 10.0
LAST_ATTEMPT_AT_END: Final = 3.0


class CaptureRule:
    """One rule that is in force."""

    __slots__ = ("name", "options", "origin", "sink")

    def __init__(self, name: str, origin: str, options: RuleOptions, sink: Sink) -> None:
        self.name = name
        self.origin = origin
        self.options = options
        self.sink = sink

    def view(self, problem: str) -> RuleView:
        fields = msgspec.structs.asdict(self.options) | {"redis": shown(self.options.redis)}
        fields |= {event: self.sink.counts[event] for event in OUTCOMES}
        return RuleView(name=self.name, origin=self.origin, **fields, pending=self.sink.pending, problem=problem)

    def keeps_sink(self, options: RuleOptions) -> bool:
        """Return True if its messages go the same way with other options."""
        same = (options.to, options.redis) == (self.options.to, self.options.redis)
        return same and not isinstance(self.sink, BrokenSink)


class CaptureRules:
    """A `Declared`."""

    Options: type[msgspec.Struct]

    def __init__(self, context: Context, config: CaptureConfig) -> None:
        self.noun = "capture"
        self.Options = RuleOptions
        self._context = context
        self._config = config
        self._store = cast("Store | None", context.store)
        self._rules: dict[str, CaptureRule] = {}
        self._hidden: dict[str, RuleOptions] = {}  #: stored, and of a name that the configuration uses
        self._topics: dict[str, tuple[CaptureRule, ...]] = {}
        self._declarations = Declarations(context, KIND, self._declared_elsewhere) if self._store is not None else None
        self._changing = self._declarations.changing if self._declarations is not None else asyncio.Lock()

    @property
    def remembered(self) -> int:
        """Return the number of topics whose rules are cached."""
        return len(self._topics)

    def __len__(self) -> int:
        return len(self._rules)

    @property
    def pending(self) -> int:
        """Return the number of messages that are pending in all rules."""
        return sum(rule.sink.pending for rule in self._rules.values())

    # -- life

    async def open(self) -> None:
        """Start the rules of the configuration and of the store."""
        async with self._changing:
            for name, options in self._config.rule.items():
                self._add(name, CONFIGURED, options, await self._make_at_start(name, options, CONFIGURED))
            for name, options in (await self._stored()).items():
                if name in self._rules:
                    self._hide(name, options)
                else:
                    self._add(name, CREATED, options, await self._make_at_start(name, options, CREATED))
            self._rebind()
        if self._declarations is not None:
            self._declarations.follow()

    async def close(self) -> None:
        """Bring what is pending to its targets, within `LAST_ATTEMPT_AT_END`."""
        await asyncio.gather(*(rule.sink.close(LAST_ATTEMPT_AT_END) for rule in self._rules.values()))

    async def reload(self, config: CaptureConfig) -> None:
        """Take other rules of the configuration; on any error everything stays as it was."""
        async with self._changing:
            created = {name: rule for name, rule in self._rules.items() if rule.origin == CREATED}
            self._check_room(len(config.rule) + len(created.keys() - config.rule.keys()), config.max_rules)
            made: dict[str, Sink] = {}
            try:
                for name, options in config.rule.items():
                    rule = self._rules.get(name)
                    if rule is None or not rule.keeps_sink(options):
                        made[name] = await self._make(name, options, rule)
            except BaseException:
                await asyncio.gather(*(sink.close(0) for sink in made.values()))
                raise
            self._config = config
            await self._replace_configured(config.rule, made)

    async def _replace_configured(self, wanted: Mapping[str, RuleOptions], made: Mapping[str, Sink]) -> None:
        ended: list[Sink] = []
        for name, rule in list(self._rules.items()):
            if name in wanted:
                if rule.origin == CREATED:
                    self._hide(name, rule.options)
                if name in made:
                    ended.append(rule.sink)
                else:
                    rule.sink.tune(wanted[name])
                    self._rules[name] = CaptureRule(name, CONFIGURED, wanted[name], rule.sink)
            elif rule.origin == CONFIGURED:
                del self._rules[name]
                ended.append(rule.sink)
        for name, sink in made.items():
            self._add(name, CONFIGURED, wanted[name], sink)
        for name in [name for name in self._hidden if name not in wanted]:
            options = self._hidden.pop(name)
            self._add(name, CREATED, options, await self._make_at_start(name, options, CREATED))
        self._rebind()
        await asyncio.gather(*(sink.close(LAST_ATTEMPT) for sink in ended))

    # -- operators

    async def list(self) -> Sequence[RuleView]:
        return [await self._view(self._rules[name]) for name in sorted(self._rules)]

    async def show(self, name: str) -> RuleView:
        return await self._view(self._rule(name))

    def options(self, name: str) -> RuleOptions:
        """Return them as they are, with the password: never to be shown."""
        return self._rule(name).options

    async def create(self, name: str, options: RuleOptions) -> RuleView:
        check_name(self.noun, name)
        async with self._changing:
            if name in self._rules:
                raise ConflictError(f"there is a capture rule {name!r} already{self._where(self._rules[name])}")
            self._check_room(len(self._rules) + 1, self._config.max_rules)
            sink = await self._make(name, options)
            await self._save(name, options, sink)
            self._add(name, CREATED, options, sink)
            self._rebind()
        await self._tell(name)
        return await self._view(self._rule(name))

    async def change(self, name: str, options: RuleOptions) -> RuleView:
        before: Sink | None = None
        async with self._changing:
            rule = self._own(name)
            if options.redis == shown(rule.options.redis):  # as a view shows it: the password is the one it had
                options = msgspec.structs.replace(options, redis=rule.options.redis)
            if rule.keeps_sink(options):
                if options.target.kind is TargetKind.STREAM:
                    self._check_stream(options.target.name)
                await self._save(name, options)
                rule.sink.tune(options)
                self._rules[name] = CaptureRule(name, CREATED, options, rule.sink)
                self._rebind()
            else:
                sink = await self._make(name, options, rule)
                await self._save(name, options, sink)
                self._add(name, CREATED, options, sink)
                self._rebind()
                before = rule.sink
        await self._tell(name)
        if before is not None:
            await before.close(LAST_ATTEMPT)
        return await self._view(self._rule(name))

    async def delete(self, name: str) -> None:
        async with self._changing:
            rule = self._own(name)
            if self._declarations is not None:
                await self._declarations.write(name, None)
            del self._rules[name]
            self._rebind()
        await self._tell(name)
        await rule.sink.close(LAST_ATTEMPT)

    async def _tell(self, name: str) -> None:
        """Have the other members put a rule in force, or end it."""
        if self._declarations is not None:
            await self._declarations.tell(name)

    async def _declared_elsewhere(self, name: str, value: bytes | None) -> None:
        """Make what another member has declared, changed or deleted so here."""
        options = self._decode(name, value) if value is not None else None
        rule = self._rules.get(name)
        if rule is not None and rule.origin == CONFIGURED:
            if options is not None:
                self._hide(name, options)
            else:
                self._hidden.pop(name, None)
        elif options is None:
            if rule is not None:
                del self._rules[name]
                self._rebind()
                self._context.spawn(rule.sink.close(LAST_ATTEMPT), "end")
        elif rule is not None and rule.keeps_sink(options):
            rule.sink.tune(options)
            self._rules[name] = CaptureRule(name, CREATED, options, rule.sink)
            self._rebind()
        else:
            self._add(name, CREATED, options, await self._make_at_start(name, options, CREATED))
            self._rebind()
            if rule is not None:
                self._context.spawn(rule.sink.close(LAST_ATTEMPT), "end")

    async def read(self, name: str, after: int, limit: int) -> Sequence[FoundMessage]:  # noqa: ARG002 - there is nothing to read
        options = self._rule(name).options
        self._elsewhere(options)

    @staticmethod
    def _elsewhere(options: RuleOptions) -> NoReturn:
        kind, target = options.target
        match kind:
            case TargetKind.STREAM:
                there = f"its messages are in the stream {target!r}: motorcade stream read {target}"
            case TargetKind.REDIS_STREAM:
                place = shown(options.redis) or "the store of this node"
                there = f"its messages are in Redis, {place}: XRANGE {target} - +"
            case TargetKind.REDIS_CHANNEL:
                there = f"its messages pass by in Redis and are kept nowhere: SUBSCRIBE {target}"
        raise ConflictError(f"a capture rule keeps no messages; {there}")

    # -- publishing

    def on_publish(self, _client: ClientInfo | None, message: Message | Handled) -> None:
        """Copy a message to the target of each rule that matches."""
        if isinstance(message, Handled):
            return
        rules = self._topics.get(message.topic)
        if rules is None:
            rules = self._find(message.topic)
        for rule in rules:
            commit = rule.sink.take(message)
            if commit is not None:
                acknowledge_after(message, commit, taken=True)

    def _find(self, topic: str) -> tuple[CaptureRule, ...]:
        if len(self._topics) >= MAX_TOPICS:
            self._topics.clear()
        found = tuple(
            rule for rule in self._rules.values() if any(matches(filter_, topic) for filter_ in rule.options.topics)
        )
        self._topics[topic] = found
        return found

    def _rebind(self) -> None:
        """Register the hook for the rules that are in force now."""
        self._topics.clear()
        filters = dict.fromkeys(filter_ for rule in self._rules.values() for filter_ in rule.options.topics)
        if filters:
            self._context.add_hook("message.publish", self.on_publish, priority=PRIORITY, topics=filters)
        else:
            self._context.remove_hook("message.publish", self.on_publish)

    # -- inside

    async def _view(self, rule: CaptureRule) -> RuleView:
        problem = rule.sink.problem
        if rule.options.target.kind is TargetKind.STREAM:
            try:
                self._check_stream(rule.options.target.name)
            except MotorcadeError as error:
                problem = str(error)
        return rule.view(problem)

    def _rule(self, name: str) -> CaptureRule:
        rule = self._rules.get(name)
        if rule is None:
            raise UnknownError(f"there is no capture rule {name!r}; see `motorcade capture list`")
        return rule

    def _own(self, name: str) -> CaptureRule:
        """Return a rule that commands may change."""
        rule = self._rule(name)
        if rule.origin == CONFIGURED:
            raise ConflictError(f"capture rule {name!r} cannot be changed here{self._where(rule)}")
        return rule

    @staticmethod
    def _where(rule: CaptureRule) -> str:
        if rule.origin != CONFIGURED:
            return ""
        return f": it stands in the configuration, [plugins.capture.rule.{rule.name}]; change it there and reload"

    @staticmethod
    def _check_room(count: int, bound: int) -> None:
        if count > bound:
            raise ConflictError(
                f"more than {bound} capture rules; raise max_rules in [plugins.capture], or remove some"
            )

    def _add(self, name: str, origin: str, options: RuleOptions, sink: Sink) -> None:
        self._rules[name] = CaptureRule(name, origin, options, sink)
        sink.start()

    def _hide(self, name: str, options: RuleOptions) -> None:
        self._hidden[name] = options
        self._context.log.warning("capture_rule_hidden", rule=name, by="the configuration has one of the same name")

    async def _make(self, name: str, options: RuleOptions, rule: CaptureRule | None = None) -> Sink:
        """Return a sink for the target of a rule, with the counts of `rule`; `MotorcadeError` if that is no target."""
        if options.target.kind is TargetKind.STREAM:
            self._check_stream(options.target.name)
        return self._sink(name, options, rule.sink.counts if rule is not None else RuleCounts(self._context.counters))

    async def _make_at_start(self, name: str, options: RuleOptions, origin: str) -> Sink:
        """Do the same when the node starts, which must not fail for what is wrong outside of the configuration."""
        counts = RuleCounts(self._context.counters)
        try:
            sink = self._sink(name, options, counts)
        except MotorcadeError as error:
            if origin == CONFIGURED:
                raise MotorcadeError(f"capture rule {name!r}: {error}") from error
            self._context.log.error("capture_rule_broken", rule=name, error=str(error))  # noqa: TRY400 - it says enough
            return BrokenSink(options, counts, str(error))
        if options.target.kind is TargetKind.STREAM:
            try:
                self._check_stream(options.target.name)
            except MotorcadeError as error:
                self._context.log.warning("capture_stream_missing", rule=name, error=str(error))
        return sink

    def _sink(self, name: str, options: RuleOptions, counts: RuleCounts) -> Sink:
        context = self._context
        if options.target.kind is TargetKind.STREAM:
            return StreamSink(options, partial(context.service, "streams"), counts)
        try:
            from motorcade.plugins.capture.redis_sink import RedisSink, servers_of  # noqa: PLC0415 - its library is an extra
        except ImportError as error:
            raise MotorcadeError(
                f"{error}; `pip install 'motorcade[redis]'` brings what {options.to!r} needs"
            ) from error
        return RedisSink(name, options, servers_of(options.redis, self._store), counts, context.spawn, context.log)

    def _check_stream(self, stream: str) -> None:
        streams: Any = self._context.service("streams")
        if streams is None:
            raise UnknownError("the plugin 'streams' is not loaded; see `motorcade plugin list`")
        if streams.stream(stream) is None:
            raise UnknownError(f"there is no stream {stream!r}; declare it first: motorcade stream create {stream}")

    async def _save(self, name: str, options: RuleOptions, sink: Sink | None = None) -> None:
        """Store a rule; if that fails, close `sink`."""
        if self._declarations is None:
            return
        try:
            await self._declarations.write(name, msgspec.json.encode(options))
        except BaseException:
            if sink is not None:
                await sink.close(0)
            raise

    async def _stored(self) -> dict[str, RuleOptions]:
        found: dict[str, RuleOptions] = {}
        if self._declarations is None:
            return found
        for name, value in (await self._declarations.load()).items():
            options = self._decode(name, value)
            if options is not None:
                found[name] = options
        return dict(sorted(found.items()))

    def _decode(self, name: str, value: bytes) -> RuleOptions | None:
        """Return the options in a record; None, logged: it cannot be read."""
        try:
            return msgspec.json.decode(value, type=RuleOptions)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._context.counters["unreadable"] += 1
            self._context.log.error("capture_rule_unreadable", rule=name, error=str(error))  # noqa: TRY400 - it says enough
            return None
