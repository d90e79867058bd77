"""Tests on real ranks: pytest's mark ``ranks`` and its fixture ``world``. docs/testing.md is the user's page.

pytest's own process collects the tests and reports them; a marked test runs on ranks that are forked for it.

Note [A test on ranks]
~~~~~~~~~~~~~~~~~~~~~~
Each rank has a pytest of its own, with the options, plugins and conftest files of the one that was started, which
collects the one test and runs it. So fixtures, skips, assertions and classes work as in any test; a fixture may use
``world``, and nothing of a test has to be pickled. Nothing of the test runs in pytest's own process. Only values that
the ranks share are made there: ``tmp_path`` and the fixtures that the mark names as ``shared``. Such a value is
pickled, and replaces the fixture on the ranks.

A test module is imported in each rank, never in the zygote: a module that asks for a GPU when it is imported, or starts
a thread, would spoil every process that is forked later.

Note [Ranks for one test]
~~~~~~~~~~~~~~~~~~~~~~~~~
The ranks are those of any job: a zygote that has imported torch forks them, they have pages, and the launcher's watch
says who is late. The zygote stays from test to test and belongs to one process, so that workers of pytest-xdist share
nothing. A rank lives for one test. Once a rank has failed the others have some seconds to end by themselves: each may
have failed too, and its values tell more than the first one's alone. A rank that is still running then, that waits in
vain, or that reaches the test's limit, is asked for its stack and ended.
"""
