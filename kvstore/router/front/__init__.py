"""HTTP between clients and engines.

door       connections, heads: all bounded
paths      which reach an engine, and how
intake     API keys, bodies; a head and a body to a request of the decision core
proxy      one request from its head to its last byte; headers that go on to engines
legs       a remote prefill beside an attempt; two attempts of one request, of which one answers
answers    rejections and errors, in OpenAI's form; stored responses, models
"""
