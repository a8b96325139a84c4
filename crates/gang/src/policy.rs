//! When a gang that failed starts again: a pure function from what happened to a decision and its reason.

use crate::error::seconds;
use std::time::Duration;

/// A gang that ran this long does not fail at once: there is nothing to wait for.
const LONG_RUN: Duration = Duration::from_secs(600);

/// How often a gang starts again, and how long it pauses before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restarts {
    /// Most restarts of one job.
    pub most: u32,
    /// The pause before the first; each following one is twice as long.
    pub first_pause: Duration,
    /// No pause is longer.
    pub longest_pause: Duration,
}

impl Default for Restarts {
    fn default() -> Self {
        Self {
            most: 0,
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(60),
        }
    }
}

/// What to do after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Start the next generation.
    Restart {
        /// The pause before.
        after: Duration,
        /// What failed, and why it is tried again.
        reason: String,
    },
    /// Give up.
    Stop {
        /// What failed, and why it is not tried again.
        reason: String,
    },
}

/// Decides what follows when a generation (the first is zero) failed because of `what`, after it had run for `ran_for`.
/// One that ran for ten minutes or more is followed by the first pause again.
///
/// ```
/// use deuteron_gang::policy::{Decision, Restarts, after_failure};
/// use std::time::Duration;
///
/// let restarts = Restarts { most: 3, ..Restarts::default() };
/// let decision = after_failure(&restarts, 1, "rank 3 on node2 exited with status 1", Duration::from_secs(20));
/// let reason = "rank 3 on node2 exited with status 1; restart 2 of 3 follows in 2.0 s".to_owned();
/// assert_eq!(decision, Decision::Restart { after: Duration::from_secs(2), reason });
/// ```
pub fn after_failure(
    restarts: &Restarts,
    generation: u64,
    what: &str,
    ran_for: Duration,
) -> Decision {
    let most = restarts.most;
    if generation >= most.into() {
        let why = match most {
            0 => "no restarts were asked for".to_owned(),
            1 => "its one restart is used up".to_owned(),
            _ => format!("all {most} restarts are used up"),
        };
        return Decision::Stop { reason: format!("{what}; {why}") };
    }
    let doublings = if ran_for >= LONG_RUN { 0 } else { generation.min(31) as u32 };
    let after = restarts.first_pause.saturating_mul(1 << doublings).min(restarts.longest_pause);
    let reason =
        format!("{what}; restart {} of {most} follows in {}", generation + 1, seconds(after));
    Decision::Restart { after, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pause() -> impl Strategy<Value = Duration> {
        prop_oneof![
            Just(Duration::ZERO),
            (0u64..100_000).prop_map(Duration::from_millis),
            Just(Duration::MAX)
        ]
    }

    proptest! {
        #[test]
        fn a_gang_restarts_exactly_as_often_as_asked_with_pauses_within_bounds(
            most in 0u32..100,
            first_pause in pause(),
            longest_pause in pause(),
            runs in prop::collection::vec(0u64..1200, 100),
        ) {
            let restarts = Restarts { most, first_pause, longest_pause };
            let mut last = Duration::ZERO;
            for (generation, seconds) in (0..).zip(runs) {
                match after_failure(&restarts, generation, "it broke", Duration::from_secs(seconds)) {
                    Decision::Restart { after, reason } => {
                        prop_assert!(generation < most.into());
                        prop_assert!(reason.starts_with("it broke; restart "), "{}", reason);
                        prop_assert!(after >= first_pause.min(longest_pause) && after <= longest_pause);
                        if seconds >= 600 {
                            prop_assert_eq!(after, first_pause.min(longest_pause));
                        } else {
                            prop_assert!(after >= last, "{:?} after {:?}", after, last);
                            last = after;
                        }
                    }
                    Decision::Stop { reason } => {
                        prop_assert_eq!(generation, u64::from(most));
                        prop_assert!(reason.starts_with("it broke; "), "{}", reason);
                        return Ok(());
                    }
                }
            }
            prop_assert!(false, "it never stopped");
        }

        #[test]
        fn any_input_has_an_answer(most: u32, generation: u64, first_pause in pause(), ran_for in pause()) {
            let restarts = Restarts { most, first_pause, longest_pause: Duration::MAX };
            let decision = after_failure(&restarts, generation, "", ran_for);
            prop_assert_eq!(matches!(decision, Decision::Stop { .. }), generation >= most.into());
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let restarts = Restarts { most: 9, ..Restarts::default() };
        let pauses: Vec<u64> = (0..9)
            .map(|generation| match after_failure(&restarts, generation, "", Duration::ZERO) {
                Decision::Restart { after, .. } => after.as_secs(),
                Decision::Stop { reason } => panic!("{reason}"),
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn the_reason_for_giving_up_says_what_was_allowed() {
        for (most, expected) in [
            (0, "x; no restarts were asked for"),
            (1, "x; its one restart is used up"),
            (3, "x; all 3 restarts are used up"),
        ] {
            let restarts = Restarts { most, ..Restarts::default() };
            let decision = after_failure(&restarts, most.into(), "x", Duration::ZERO);
            assert_eq!(decision, Decision::Stop { reason: expected.into() });
        }
    }
}
