//! Drivers that misbehave: what it costs them, and what it costs others.

use super::guest::PREPARE_ONE;
use super::*;
use crate::limits::concurrency::{SLOW_CALLS_MAX, SLOW_CALLS_PER_DRIVER};
use nodedock_core::driver::quarantine::{FAILURES_MAX, PERIOD_MIN};
use nodedock_core::driver::{Call, ClaimDriver};
use nodedock_model::{Problem, ProblemCode, ProblemKind};

/// Misbehaves when it is asked for two claims, and prepares one.
fn two_faced(misbehaviour: &str) -> Guest {
    let prepare =
        format!("(if (i32.gt_u (local.get 12) (i32.const 1)) (then {misbehaviour})) {PREPARE_ONE}");
    Guest {
        prepare,
        ..Guest::default()
    }
}

const SPIN: &str = "(loop $l (br $l))";

/// Computes for some time, and ends well.
const TOIL: &str = "(local $i i32)
    (loop $l (local.set $i (i32.add (local.get $i) (i32.const 1))) (br_if $l (i32.lt_u (local.get $i) (i32.const 40000000))))
    i32.const 8192";

async fn well(driver: &WasmDriver) -> Result<(), Problem> {
    driver
        .prepare(&a_call(), &[a_claim("u-1")])
        .await
        .remove("u-1")
        .unwrap()
        .map(drop)
}

async fn badly(driver: &WasmDriver) -> Problem {
    driver
        .prepare(&a_call(), &[a_claim("u-1"), a_claim("u-2")])
        .await
        .remove("u-1")
        .unwrap()
        .unwrap_err()
}

async fn into_quarantine(driver: &WasmDriver, code: &str) {
    for _ in 0..FAILURES_MAX {
        assert!(driver.containment().quarantined().is_none());
        let problem = badly(driver).await;
        assert_eq!(problem.code, code, "{problem}");
    }
}

/// Turns the clock to the end of the quarantine.
async fn after_it() {
    tokio::time::pause();
    tokio::time::advance(PERIOD_MIN).await;
    tokio::time::resume();
}

#[tokio::test]
async fn quarantine_ends_when_a_probe_succeeds() {
    let flood = Guest {
        imports: "(import \"nodedock:driver/log@0.2.0\" \"write\" (func $log (param i32 i32 i32 i32 i32)))"
            .into(),
        ..two_faced(
            "(loop $l (call $log (i32.const 2) (i32.const 2048) (i32.const 16) (i32.const 0) (i32.const 0)) (br $l))",
        )
    };
    for (guest, code) in [
        (two_faced("unreachable"), "driver-trapped"),
        (two_faced(SPIN), "driver-cpu-limit"),
        (
            two_faced("(loop $l (drop (memory.grow (i32.const 16))) (br $l))"),
            "driver-memory-limit",
        ),
        (flood, "driver-cpu-limit"),
    ] {
        let driver = Stage::new()
            .try_load(guest.module(), "limits: {cpuMs: 20, memoryMiB: 8}")
            .await
            .unwrap();
        into_quarantine(&driver, code).await;
        let before = calls(&driver);
        for problem in [badly(&driver).await, well(&driver).await.unwrap_err()] {
            assert_eq!(
                (problem.kind, problem.code.as_str()),
                (
                    ProblemKind::Unavailable,
                    ProblemCode::DriverQuarantined.as_str()
                )
            );
            let wait = problem.retry_after_ms.unwrap();
            assert!((1000..=5001).contains(&wait), "{wait}");
            for part in [
                "since 2",
                "not before 2",
                "5 failures",
                "prepare: the driver",
                "nodedock driver resume tiny.example.com",
            ] {
                assert!(problem.message.contains(part), "{part} in {problem}");
            }
        }
        assert_eq!(calls(&driver), before, "it is not called");
        after_it().await;
        assert_eq!(badly(&driver).await.code, code, "the probe");
        assert_eq!(
            well(&driver).await.unwrap_err().code,
            ProblemCode::DriverQuarantined
        );
        after_it().await;
        after_it().await;
        well(&driver).await.unwrap();
        well(&driver).await.unwrap();
        assert!(driver.containment().quarantined().is_none());
    }
}

#[tokio::test]
async fn late_calls_are_failures_unlike_refusals() {
    let spin = Stage::new().load(&two_faced(SPIN)).await;
    let call = Call {
        deadline: Duration::from_millis(500),
        ..a_call()
    };
    for _ in 0..FAILURES_MAX {
        let outcomes = spin.prepare(&call, &[a_claim("u-1"), a_claim("u-2")]).await;
        assert_eq!(
            outcomes["u-1"].as_ref().unwrap_err().code,
            "driver-deadline"
        );
    }
    assert_eq!(
        well(&spin).await.unwrap_err().code,
        ProblemCode::DriverQuarantined
    );

    // An inventory at the place of a problem: kind invalid, and no code.
    let refuses = "(i32.store8 (i32.const 8192) (i32.const 1)) i32.const 8192";
    let driver = Stage::new()
        .load(&Guest {
            discover: refuses.into(),
            ..Guest::default()
        })
        .await;
    for _ in 0..=FAILURES_MAX {
        let problem = driver
            .discover(&a_call(), Trigger::Timer)
            .await
            .unwrap_err();
        assert_ne!(problem.code, ProblemCode::DriverQuarantined);
    }
    assert!(driver.containment().quarantined().is_none());
}

#[tokio::test]
async fn only_one_probe_runs_at_once() {
    let driver = Stage::new()
        .try_load(two_faced(SPIN).module(), "limits: {cpuMs: 100}")
        .await
        .unwrap();
    into_quarantine(&driver, "driver-cpu-limit").await;
    after_it().await;
    {
        let claims = [a_claim("u-1"), a_claim("u-2")];
        let call = a_call();
        let mut probe = driver.prepare(&call, &claims);
        assert!(futures::poll!(&mut probe).is_pending());
        assert!(
            driver
                .containment()
                .quarantined()
                .unwrap()
                .period
                .is_probed()
        );
        let problem = well(&driver).await.unwrap_err();
        assert_eq!(problem.code, ProblemCode::DriverQuarantined);
        assert!(problem.retry_after_ms.unwrap() > 0);
    }
    assert!(
        !driver
            .containment()
            .quarantined()
            .unwrap()
            .period
            .is_probed()
    );
    well(&driver).await.unwrap();
}

#[tokio::test]
async fn operator_or_reload_ends_a_quarantine() {
    let stage = Stage::new();
    let driver = stage.load(&two_faced("unreachable")).await;
    assert!(!driver.containment().resume());
    into_quarantine(&driver, "driver-trapped").await;
    let again = stage.load(&two_faced("unreachable")).await;
    well(&again).await.unwrap();
    assert_eq!(
        well(&driver).await.unwrap_err().code,
        ProblemCode::DriverQuarantined
    );
    assert!(driver.containment().resume());
    into_quarantine(&driver, "driver-trapped").await;
}

#[tokio::test]
async fn slow_call_succeeds_on_slow_runtime() {
    let driver = Stage::new()
        .load(&Guest {
            discover: TOIL.into(),
            prepare: PREPARE_ONE.into(),
            ..Guest::default()
        })
        .await;
    assert_eq!(
        driver
            .discover(&a_call(), Trigger::Load)
            .await
            .unwrap()
            .device_count(),
        0
    );
    assert!(driver.containment().is_slow(Operation::Discover));
    well(&driver).await.unwrap();
    assert!(!driver.containment().is_slow(Operation::Prepare));
    // From the start on the slow runtime, this time.
    assert_eq!(
        driver
            .discover(&a_call(), Trigger::Load)
            .await
            .unwrap()
            .device_count(),
        0
    );
}

/// Sixteen looping calls of one driver held another's call for many ticks.
#[tokio::test]
async fn spinning_calls_yield_the_thread() {
    let stage = Stage::new();
    let spin = Guest {
        prepare: SPIN.to_owned() + " unreachable",
        ..Guest::default()
    };
    let spinning = stage
        .try_load(spin.module(), "limits: {cpuMs: 20000, wallMs: 40000}")
        .await
        .unwrap();
    let other = stage
        .load(&Guest {
            prepare: PREPARE_ONE.into(),
            ..Guest::default()
        })
        .await;
    let (call, claims) = (a_call(), [a_claim("u-1")]);
    let mut calls: Vec<_> = (0..16).map(|_| spinning.prepare(&call, &claims)).collect();
    for call in &mut calls {
        assert!(futures::poll!(call).is_pending());
    }
    for _ in 0..100 {
        well(&other).await.unwrap();
    }
    assert_eq!(other.stats().ended(Outcome::Busy), 0);
    assert!(
        calls
            .iter_mut()
            .all(|call| futures::FutureExt::now_or_never(call).is_none())
    );
}

#[tokio::test]
async fn cancelled_slow_call_drops_its_store() {
    let stage = Stage::new();
    let spinning = stage
        .load(&Guest {
            discover: SPIN.to_owned() + " unreachable",
            ..Guest::default()
        })
        .await;
    let call = Call {
        deadline: Duration::from_millis(20),
        ..a_call()
    };
    // Each returns its permits: else the fifth would find none.
    for _ in 0..=SLOW_CALLS_PER_DRIVER {
        spinning.containment().resume();
        let problem = spinning.discover(&call, Trigger::Load).await.unwrap_err();
        // On a busy machine it may have had no thread.
        assert!(
            ["driver-deadline", "driver-busy"].contains(&problem.code.as_str()),
            "{problem:?}"
        );
    }
    let all = stage
        .host
        .permits
        .slow
        .memories
        .acquire_many(SLOW_CALLS_MAX as u32);
    drop(
        tokio::time::timeout(Duration::from_secs(60), all)
            .await
            .expect("the permits are returned"),
    );
}
