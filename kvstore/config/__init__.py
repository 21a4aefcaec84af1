"""From flags and YAML to settings, checked: one sentence for each error.

settings        the table of all settings; reading: flags and YAML files to values of the table
values          the forms of values: addresses, sizes, files
node, router    of `kvstore node`; of `kvstore router`, and its policy file
cluster         of `kvstore index`; what a node has beyond one machine: --transport, --engine-events
machine         memory and file systems there are; whether --file fits
defaults        defaults in help texts; imports nothing
"""
