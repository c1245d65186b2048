import pytest

from kvmosaic.client.patience import MAX_PAUSE_S, MIN_PAUSE_S, SLOW_SHARE, Patience

BUDGET_S = 0.05
SLOW_BUDGET_S = SLOW_SHARE * BUDGET_S


@pytest.fixture
def patience() -> Patience:
    patience = Patience(BUDGET_S)
    patience.begin_step()
    return patience


def test_nothing_is_asked_before_the_first_step() -> None:
    assert Patience(BUDGET_S).allowance_s(now=0) == 0


def test_quick_answers_use_up_one_budget(patience: Patience) -> None:
    for _ in range(5):
        patience.answered(0.009)
        patience.check()
    assert patience.allowance_s(now=0) == pytest.approx(0.005)
    patience.answered(0.009)
    assert patience.allowance_s(now=0) == 0
    patience.begin_step()
    assert patience.allowance_s(now=0) == BUDGET_S


def test_a_slow_answer_shortens_this_step_only(patience: Patience) -> None:
    patience.answered(0.011)
    assert patience.allowance_s(now=0) == SLOW_BUDGET_S
    patience.begin_step()
    assert patience.allowance_s(now=0) == BUDGET_S


def test_a_passed_deadline_shortens_the_steps_until_an_answer_comes(patience: Patience) -> None:
    patience.gave_up(0.011, now=0)
    patience.begin_step()
    assert patience.allowance_s(now=MIN_PAUSE_S) == SLOW_BUDGET_S
    patience.answered(0.001)
    patience.begin_step()
    assert patience.allowance_s(now=MIN_PAUSE_S) == BUDGET_S


def test_a_step_waits_no_longer_than_its_budget_whatever_comes(patience: Patience) -> None:
    for answer_s in (0.002, 0.02, 0.005, 0.03, 0.004):
        patience.begin_step()
        waited_s = 0.0
        while (allowance_s := patience.allowance_s(now=0)) > 0:
            wait_s = min(answer_s, allowance_s)
            waited_s += wait_s
            patience.answered(wait_s)
            patience.check()
        assert waited_s <= BUDGET_S + 1e-9


def test_a_passed_deadline_pauses_twice_as_long_each_time(patience: Patience) -> None:
    now, pauses = 100.0, []
    for _ in range(6):
        patience.begin_step()
        assert patience.allowance_s(now) == (SLOW_BUDGET_S if pauses else BUDGET_S)
        patience.gave_up(0.001, now)
        patience.check()
        began = now
        while patience.allowance_s(now) == 0:
            now += 0.01
        pauses.append(round(now - began, 2))
    assert pauses == [MIN_PAUSE_S, 0.2, 0.4, 0.8, MAX_PAUSE_S, MAX_PAUSE_S]


def test_an_answer_ends_the_doubling(patience: Patience) -> None:
    patience.gave_up(0.001, now=0)
    patience.gave_up(0.001, now=1)
    patience.answered(0.001)
    patience.gave_up(0.001, now=2)
    assert patience.allowance_s(now=2 + MIN_PAUSE_S) > 0


def test_the_slow_budget_is_a_share_of_the_users() -> None:
    patience = Patience(0.002)
    patience.gave_up(0.002, now=0)
    patience.begin_step()
    patience.check()
    assert patience.allowance_s(now=1) == pytest.approx(SLOW_SHARE * 0.002)
