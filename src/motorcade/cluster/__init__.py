"""Several nodes that serve as one: members, and what they say to each other.

options    options of the links
security   secret and certificates of links, and which addresses need them
frames     the bytes between two members; pure
greeting   the handshake of two members: who they are, and that they know the secret; pure
link       one peer: items in order, confirmed, sent again after a break; questions, pings; pure
links      all links of a member: sockets, timers, reconnects
membership who is a member, who is dead, who has to step back; pure
view       whether a member may rely on what it knows of the others; pure
roster     the records of members in the store
notes      the feeds of all cells: notes to their handlers, cells that are read again
member     this node as a member: all of these together
"""
