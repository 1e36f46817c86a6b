"""The page of operators lists what the registry has."""

from tools.list_operators import PAGE, families


def test_every_operator_with_a_rule_is_listed() -> None:
    listed = PAGE.read_text()
    for family, (sentence, names) in families().items():
        assert sentence in listed, f"{family}: run python tools/list_operators.py"
        missing = sorted(n for n in names if n not in listed)
        assert not missing, f"{family} has {missing}: run python tools/list_operators.py"
