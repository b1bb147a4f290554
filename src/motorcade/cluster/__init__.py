"""Several nodes that serve as one: members, and what they say to each other.

options    what may be set
security   secret and certificates of links, and which addresses need them
frames     the bytes between two members; pure
greeting   how a connection between two members begins: who they are, and that they know the secret; pure
link       one peer: items in order, confirmed, sent again after a break; questions, pings; pure
links      all links of a member: sockets, timers, reconnects
"""
