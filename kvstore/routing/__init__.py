"""The decision core of the router (pure): which worker serves a request, when, and why.

    Arrived, FirstToken, RequestEnded, … ─▶ core.step(event, now_ns) ─▶ Routed, Rejected, …

| module         | cares about                                         | in → out                  |
|----------------|-----------------------------------------------------|---------------------------|
| `core`         | the whole: new requests, one table of them, `check` | events → commands         |
| `values`       | requests, prefixes, workers, as the shell has them  | –                         |
| `events`       | the values that go in and come out                  | –                         |
| `policy`       | configuration, its validation and hash              | dict → `RoutingPolicy`    |
| `receipts`     | the record of a decision, made from a draft         | –                         |
| `models`       | names, aliases, adapters, weighted pools            | name, session → pool      |
| `requests`     | a request under way; the result of an attempt       | –                         |
| `fleet`        | a row a worker: counts, loads                       | events → rows             |
| `rows`         | columns, weights, flights, health of each worker    | –                         |
| `pressure`     | saturation and cause, degradation, desired replicas | columns → gauges          |
| `features`     | numbers of one request at each worker               | fleet, prefixes → columns |
| `costs`        | seconds to the first token, term by term            | features → terms          |
| `placing`      | one attempt: decode worker, then the prefiller      | request → placement       |
| `legs`         | flights; races; whose fault a failure is            | placements → counts       |
| `role_planner` | roles of workers that may change them               | load → roles              |
| `decide`       | filter, score by a policy, choose; `replay`         | features → verdict        |
| `learning`     | weights of terms, from predicted and achieved TTFT  | terms, seconds → weights  |
| `tree`         | approximate prefixes, by what was sent where        | keys → blocks a worker    |
| `split`        | local or remote prefill; who may take it            | lengths, load → where     |
| `waiting`      | held requests: classes, tenants, lanes              | –                         |
| `ahead`        | sessions, pins, blocks brought ahead of time        | held, hints → Prepare     |

Time is an argument: nanoseconds of a clock that does not go back. Durations are seconds (`_s`).
Randomness is the seed of the core and the number of the decision.
"""
