"""What is typed: commands, what they ask, and how answers look. Decides nothing about blocks.

main              the command line: node, index, certs, upgrade, clear, fsck
reasons           words and sentences of reasons
look_commands     inspect, explain, top: flags to questions
commands          flags of settings, options that several commands share
look, ask         what is asked, of whom; the client of the inspect service
prefix, tell      where a prompt's blocks are; facts and tables of an answer
top, top_screen, top_view   figures, the terminal, what it looks like
certs, fsck       a CA for a lab; a file tier's directory, read whole
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
