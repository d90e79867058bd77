"""Tests on real ranks: pytest's mark ``ranks`` and its fixture ``world``. docs/testing.md is the user's page.

pytest's own process collects the tests and reports them; what a marked test does runs on ranks that are forked for it.

Note [A test on ranks]
~~~~~~~~~~~~~~~~~~~~~~
Each rank has a pytest of its own, with the options, plugins and conftest files of the one that was started, which
collects the one test and runs it. So fixtures, skips, assertions and classes are what they are anywhere; a fixture may
use ``world``, and nothing of a test has to be pickled. In pytest's own process nothing of the test runs. What the ranks
are to have in common is made there: ``tmp_path`` and what the mark names as ``shared``. Its value is pickled, and on
the ranks it stands in the place of the fixture.

A test module is imported in each rank, never in the zygote: a module that asks for a GPU when it is imported, or starts
a thread, would spoil every process that is forked later.

Note [Ranks for one test]
~~~~~~~~~~~~~~~~~~~~~~~~~
The ranks are those of any job: a zygote that has imported torch forks them, they have pages, and the launcher's watch
says who is late. The zygote stays from test to test and is the process's own, so that workers of pytest-xdist share
nothing. A rank lives for one test. Once a rank has failed the others have some seconds to end by themselves: each may
have failed too, and its values tell more than the first one's alone. What then still runs, or waits for what can't come
any more, or is there at the test's limit, is asked for its stack and ended.
"""
