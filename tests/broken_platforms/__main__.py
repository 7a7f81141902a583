"""`python -m tests.broken_platforms`: the matrix of checks and broken platforms."""

import sys

from graphhal.testing import checks
from tests.broken_platforms.catalogue import FAULTS


def main() -> int:
    """Run every check on every broken platform; 1 where a row is not as declared."""
    names = [check.name for check in checks()]
    caught = {}
    wrong = 0
    for fault in FAULTS.values():
        caught[fault.name] = set(fault.failed())
        as_declared = caught[fault.name] == fault.caught_by
        wrong += not as_declared
        print(f"{fault.name}: {', '.join(sorted(caught[fault.name])) or 'NOT CAUGHT'}", flush=True)
        if not as_declared:
            print(f"  declared: {', '.join(sorted(fault.caught_by))}")
    print("\nThe matrix: one column a check, in the order below")
    for name, failed in caught.items():
        row = "".join("#" if check in failed else "·" for check in names)
        print(f"{row}  {name}")
    print(f"\n{'check':<44} caught  alone")
    for name in names:
        by = [fault for fault, failed in caught.items() if name in failed]
        alone = [fault for fault in by if caught[fault] == {name}]
        print(f"{name:<44} {len(by):>6}  {', '.join(alone) or 'NONE'}")
    print(f"\n{len(FAULTS)} broken platforms, {len(names)} checks")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
