"""What is not believed without a look.

| module     | cares about                                           | in → out            |
|------------|-------------------------------------------------------|---------------------|
| `scrubs`   | what of dram is verified again                        | Tick → Scrub        |
| `switches` | spaces whose blocks differ from what engines compute  | findings → off, on  |
"""
