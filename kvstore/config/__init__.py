"""From flags and YAML to frozen settings, checked: one sentence for each error.

settings        the table of all settings; reading: flags and YAML to values of the table
yaml_file       a YAML file that an operator wrote
values          the forms of values: addresses, sizes, files
node, router    of `kvstore node`; of `kvstore router`, and its policy file
cluster         of `kvstore index`; the part of a node that reaches beyond one machine
transports, engine_sources   --transport, by itself since back ends need numpy; --engine-events
machine         memory and file systems there are; whether --file fits
defaults        defaults in help texts; imports nothing
"""
