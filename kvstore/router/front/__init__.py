"""HTTP between clients and engines.

door            connections, framing, bodies: all bounded
proxy           one request from its head to its last byte; attempt: its bytes at one worker
prefill         the leg at a prefiller; what either leg's body becomes
race            two attempts of one request, of which one answers
answers         endpoints; rejections and errors, in OpenAI's form; stored responses, models
intake          API keys; a head and a body to a request of the decision core
bodies, heads   fields and headers: what is read, dropped and set
"""
