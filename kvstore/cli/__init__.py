"""Commands: their flags, their queries, and how answers look. Decides nothing about blocks.

main              the command line: node, index, certs, upgrade, clear, fsck
reasons           words and sentences of reasons
look_commands     inspect, explain, top: flags to queries
commands          flags of settings, options that several commands share
look, ask         queries and answers, facts and tables; the client of the inspect service
prefix            locations of a prompt's blocks
top, top_screen, top_view   figures of nodes, the terminal, the layout
top_routers, top_routers_view   the same of routers, from their pages
route             decisions of a router: explain, replay
certs, fsck       a CA for a lab; a full read of a disk tier's directory
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
