"""Commands: their flags, their queries, and how answers look. Decides nothing about blocks.

main              the command line: node, index, certs, upgrade, clear, fsck, demo, up
look_commands     inspect, explain, top, doctor: flags to queries
commands          flags of settings, options that several commands share
ask               clients of a node and of the index; questions over HTTP
tables            columns as data; rows of a node
look              inspect, explain: facts and tables of an answer, hours and money
prefix            locations of a prompt's blocks
top               states of processes, as pages show them, in a terminal
route             decisions of a router: explain, replay
plan              sizes and times of a deployment, from a config.json and rates
doctor_checks     findings about this machine: facts and verdicts
certs, fsck       a CA for a lab; a full read of a disk tier's directory
"""

import kvstore.net  # noqa: F401 -- it makes gRPC quiet, before anything imports it
