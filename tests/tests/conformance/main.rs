//! One list of cases for both kinds of driver. Each is run with a WASM driver and with a native plugin through the real daemon, and
//! must come to the same story: answers, claims, checkpoint and what the driver was asked.
//!
//! `scripted` has the commands of a driver; `kind` how each kind follows them; `scene` what a story records and what differs by
//! nature. What else differs is in `differences`, with the reason.

mod differences;
mod kind;
mod scene;

use kind::{Native, Wasm};
use scene::Story;

/// Each case is a function over a kind in a module of its own theme.
macro_rules! cases {
    ($($module:ident: [$($case:ident),+ $(,)?])+) => {
        $(
            mod $module;
            $(
                #[tokio::test]
                async fn $case() {
                    let wasm = Box::pin($module::$case::<Wasm>());
                    let native = Box::pin($module::$case::<Native>());
                    let (wasm, native) = tokio::join!(wasm, native);
                    assert_same(&wasm, &native);
                }
            )+
        )+
    };
}

cases! {
    plain: [
        a_claim_is_prepared_once_and_unprepared_once,
        the_claims_of_a_pod_are_one_call,
        a_driver_that_is_not_there_leaves_nothing_behind,
    ]
    refusals: [
        a_claim_that_is_refused_for_good_is_rolled_back_with_its_driver,
        a_claim_that_is_refused_for_good_is_asked_for_again_when_its_driver_has_changed,
        a_claim_that_is_refused_for_now_is_kept_until_the_driver_takes_it,
        a_claim_that_was_never_prepared_is_unprepared_by_its_driver,
        the_other_claim_of_the_pod_is_prepared_and_not_asked_for_again,
        an_unprepare_that_the_driver_refuses_is_retried_without_a_request,
    ]
    defects: [
        a_claim_that_is_left_out_is_refused_alone,
        a_claim_that_is_answered_twice_is_refused_alone,
        a_claim_whose_answer_is_for_another_claim_is_refused_alone,
        an_answer_beyond_the_bounds_refuses_its_claim_alone,
        an_answer_for_an_unknown_claim_is_dropped,
        an_unprepare_that_is_left_out_keeps_the_claim,
        an_unprepare_that_is_answered_twice_keeps_the_claim,
    ]
    late: [
        a_slow_driver_is_waited_for_and_delays_no_other,
        a_call_past_its_deadline_is_retried_and_its_late_answer_is_not_taken,
        a_slow_unprepare_is_waited_for,
        an_unprepare_past_its_deadline_is_retried,
    ]
    gone: [
        a_driver_that_dies_in_a_prepare_leaves_all_claims_of_the_call_preparing,
        an_unprepare_in_which_the_driver_dies_is_retried,
        a_driver_that_leaves_during_a_call_still_answers_it,
        a_claim_of_an_absent_driver_is_unprepared_when_it_is_back,
    ]
    released: [
        a_claim_of_a_driver_that_is_gone_is_released_and_does_not_come_back_with_it,
        a_crash_in_the_middle_of_a_release_leaves_the_claim,
    ]
    crash: [
        a_crash_while_the_driver_prepares,
        a_crash_while_the_driver_prepares_and_then_an_unprepare,
        a_crash_as_the_driver_answers,
        a_crash_after_the_answer,
        a_crash_after_a_refusal,
        a_crash_during_an_unprepare,
        a_crash_while_the_driver_is_gone,
    ]
}

/// The first step that differs is the one to look at.
fn assert_same(one: &Story, other: &Story) {
    for ((step, one), (_, other)) in one.iter().zip(other) {
        let (one_text, other_text) = (format!("{one:#}"), format!("{other:#}"));
        assert!(
            one == other,
            "at {step:?} the one has\n{one_text}\nand the other\n{other_text}"
        );
    }
    assert_eq!(one.len(), other.len(), "they tell as many steps");
}

/// Both kinds in one claim, in either part.
mod together;

macro_rules! together {
    ($($case:ident),+ $(,)?) => {
        $(
            #[tokio::test]
            async fn $case() {
                let one = Box::pin(together::$case::<Wasm, Native>());
                let other = Box::pin(together::$case::<Native, Wasm>());
                let (one, other) = tokio::join!(one, other);
                assert_same(&one, &other);
            }
        )+
    };
}

together! {
    what_one_driver_refuses_for_now_keeps_the_others_result,
    what_one_driver_refuses_for_good_is_not_rolled_back_under_the_other,
    a_crash_while_one_driver_prepares_asks_both_again,
}
