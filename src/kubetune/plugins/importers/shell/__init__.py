"""What a script surely does: the commands that it calls, with the values of their variables.

Nothing is run. The script is walked as a shell would walk it, and what only a running shell can tell is marked:

    SIZE=${SIZE:-small}                       SIZE is small: a default counts if nothing sets the variable
    if [ $SIZE = small ]; then LR=2e-4; fi    LR is 2e-4: both sides are known
    if [ -d data ]; then LR=3e-4; fi          LR is 2e-4 or 3e-4: words with it keep `$LR`, and `unclear` says why
    [ -d data ] && ARGS+=(--bf16)             "${ARGS[@]}" has --bf16 as a word that is not certain
    train() { LR=$1; swift sft; }             not followed: what it sets is not certain, and `swift sft` may be called
"""

from __future__ import annotations

from kubetune.plugins.importers.shell.beyond import doubts_of
from kubetune.plugins.importers.shell.nodes import all_below, line_of, parsed
from kubetune.plugins.importers.shell.state import Command, Script, Word
from kubetune.plugins.importers.shell.values import Values
from kubetune.plugins.importers.shell.walk import Walk

__all__ = ["Command", "Script", "Word", "read_script"]


def read_script(text: str) -> Script:
    """Return the commands that a script calls, in their order."""
    tree = parsed(text)
    doubts = doubts_of(tree)
    walk = Walk(Values(doubts))
    walk.all(tree.named_children)
    script = walk.commands.script
    for node in all_below(tree):
        if node.is_error or node.is_missing:
            script.unread[line_of(node)] = "cannot be parsed, so what it does is not known"
    script.unclear |= doubts.of_names | walk.values.unclear
    script.functions = doubts.functions
    return script
