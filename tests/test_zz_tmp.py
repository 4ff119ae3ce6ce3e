from pathlib import Path
from tests.nodes import *
def test_grow(tmp_path):
    import time
    t=time.monotonic()
    def p(*a): print(round(time.monotonic()-t,2),*a)
    with Nodes(tmp_path, "--nnodes=1:3", *at_c10d(), script=GLOO) as nodes:
        a, b = nodes.start("a", "b")
        two = nodes.formed(a, b); p(two)
        c, = nodes.start("c")
        three = nodes.formed(a,b,c); p(three)
        b.vanish(); p("van")
        two=nodes.formed(a,c); p(two)
        for n in (a,c): n.tell(GOOD)
        print([n.end() for n in (a,c)]); p()
        print(nodes.story())
