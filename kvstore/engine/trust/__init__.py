"""Verification of blocks in the background, and of spaces.

| module     | cares about                                           | in → out            |
|------------|-------------------------------------------------------|---------------------|
| `scrubs`   | repeated verification of dram                         | Tick → Scrub        |
| `switches` | spaces whose blocks differ from what engines compute  | findings → off, on  |
"""
