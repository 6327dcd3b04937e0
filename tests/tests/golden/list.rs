//! The list. The expected output is the same to the byte in every language.

use std::slice::from_ref;
use std::time::Instant;

use futures::future::join_all;
use nodedock_core::driver::ClaimDriver;
use nodedock_model::limit::CALL_MEMORY;
use nodedock_model::{DriverClaim, DriverClaimRecord, PreparedClaim, Problem, ProblemKind};
use nodedock_tests::golden::{CPUS, GOLDEN_NAME, Spent, call, claim, live, with_parameters};
use nodedock_wasm::{Limit, Outcome, Trigger};
use serde_json::{Value, json};

use crate::Loaded;

const QUIET: &str = r#"{"mode": "quiet"}"#;

pub(crate) async fn run(loaded: &Loaded) {
    describes_itself(loaded);
    is_denied_what_is_not_granted(loaded).await;
    discovers_its_slots(loaded).await;
    prepares_and_comes_to_the_same_again(loaded).await;
    reads_parameters_as_they_apply(loaded).await;
    refuses_for_good(loaded).await;
    gives_each_claim_its_own_outcome(loaded).await;
    knows_its_claims_by_the_ledger(loaded).await;
    unprepares_by_the_memo(loaded).await;
    answers_twenty_calls_at_once(loaded).await;
    stays_within_the_default_limits(loaded);
    tells_what_it_costs(loaded).await;
}

async fn prepare(loaded: &Loaded, claim: &DriverClaim) -> Result<PreparedClaim, Problem> {
    let mut outcomes = loaded.driver.prepare(&call(), from_ref(claim)).await;
    outcomes
        .remove(&claim.id.uid)
        .expect("each claim has an outcome")
}

async fn unprepare(loaded: &Loaded, live: &DriverClaimRecord) -> Result<(), Problem> {
    let mut outcomes = loaded.driver.unprepare(&call(), from_ref(live)).await;
    outcomes
        .remove(&live.claim.id.uid)
        .expect("each claim has an outcome")
}

fn json_of(value: impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("it is kept as JSON")
}

#[track_caller]
fn is_refusal<T: std::fmt::Debug>(
    outcome: Result<T, Problem>,
    kind: ProblemKind,
    code: &str,
) -> String {
    let problem = outcome.expect_err("it is refused");
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (kind, code),
        "{problem:?}"
    );
    assert_eq!(problem.retry_after_ms, None, "{problem:?}");
    problem.message
}

fn describes_itself(
    Loaded {
        golden,
        driver,
        denied,
        ..
    }: &Loaded,
) {
    let info = driver.info();
    assert_eq!(
        (info.name.as_str(), info.version.as_str()),
        (GOLDEN_NAME, "0.1.0")
    );
    assert_eq!(info.summary, "Two slots, the same driver in every language");
    assert_eq!(
        info.annotations,
        [("language".to_owned(), golden.language.to_owned())].into()
    );
    assert!(info.event_subsystems.is_empty());
    assert_eq!(info.limits, Default::default());
    assert_eq!(info, denied.info(), "the same with nothing granted");
    assert_eq!(
        denied.missing_grants(),
        ["sysfsRead: devices/system/cpu/online", "env: GOLDEN_*"]
    );
    assert!(driver.missing_grants().is_empty());
    assert!(driver.surface().facets().is_empty());
    assert_eq!(
        driver.surface().profile(),
        Some(golden.profile),
        "{:?}",
        driver.surface().imports
    );
}

async fn is_denied_what_is_not_granted(Loaded { denied, .. }: &Loaded) {
    let problem = denied
        .discover(&call(), Trigger::Load)
        .await
        .expect_err("nothing is granted");
    let through_the_driver =
        Problem::denied("not-granted", format!("{CPUS} is not granted (sysfsRead)"));
    assert_eq!(problem, through_the_driver.with("grant", "sysfsRead"));
    let claim = claim("denied", &["slot-0"]);
    let outcome = denied
        .prepare(&call(), from_ref(&claim))
        .await
        .remove(&claim.id.uid);
    let problem = outcome
        .expect("an outcome")
        .expect_err("the variable is not granted");
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Denied, "edit-denied"),
        "{problem:?}"
    );
}

async fn discovers_its_slots(Loaded { driver, .. }: &Loaded) {
    let slot = |index: i64| {
        json!({
            "attributes": {
                "index": index, "model": "Golden Slot", "firmware": "1.2.0", "spare": index > 0, "cpus": "0-3",
            },
            "capacities": {}, "taints": [], "consumes": [], "allow_multiple_allocations": true,
            "identity": [], "numa_nodes": [], "annotations": {},
        })
    };
    let pool = json!({
        "devices": {"slot-0": slot(0), "slot-1": slot(1)},
        "shared_counters": [], "extended_resource": null, "annotations": {},
    });
    for trigger in [
        Trigger::Load,
        Trigger::Events(vec!["devices/virtual/mem/null".to_owned()]),
    ] {
        let inventory = driver.discover(&call(), trigger).await.expect("discover");
        assert_eq!(json_of(inventory), json!({"pools": {"slots": pool}}));
    }
}

async fn prepares_and_comes_to_the_same_again(loaded: &Loaded) {
    let claim = claim("pair", &["slot-0", "slot-1"]);
    let prepared = prepare(loaded, &claim).await.expect("prepare");
    assert_eq!(prepared.memo, b"slot-0 normal\nslot-1 normal\n");
    let device = |request: &str, slot: &str, variable: &str| {
        json!({
            "requests": [request], "pool": "slots", "device": slot,
            "access": {"edits": {"env": [format!("{variable}=normal")]}},
        })
    };
    let mut second = device("request-1", "slot-1", "GOLDEN_SLOT_1");
    second["share_id"] = json!("5c3f1f1e-share");
    assert_eq!(
        json_of(&prepared.devices),
        json!([device("request-0", "slot-0", "GOLDEN_SLOT_0"), second])
    );
    assert!(prepared.edits.is_empty() && prepared.annotations.is_empty());
    assert_eq!(prepare(loaded, &claim).await, Ok(prepared));
}

async fn reads_parameters_as_they_apply(loaded: &Loaded) {
    let both = || claim("modes", &["slot-0", "slot-1"]);
    for (claim, memo) in [
        (
            with_parameters(both(), &[], QUIET),
            "slot-0 quiet\nslot-1 quiet\n",
        ),
        (
            with_parameters(both(), &["request-1"], QUIET),
            "slot-0 normal\nslot-1 quiet\n",
        ),
        (
            with_parameters(both(), &["request-1/sub"], QUIET),
            "slot-0 normal\nslot-1 quiet\n",
        ),
        (
            with_parameters(both(), &["another"], QUIET),
            "slot-0 normal\nslot-1 normal\n",
        ),
        (
            with_parameters(with_parameters(both(), &[], QUIET), &["request-0"], " { } "),
            "slot-0 normal\nslot-1 quiet\n",
        ),
    ] {
        let prepared = prepare(loaded, &claim).await.expect("prepare");
        assert_eq!(
            String::from_utf8_lossy(&prepared.memo),
            memo,
            "{:?}",
            claim.configs
        );
    }
}

async fn refuses_for_good(loaded: &Loaded) {
    let with = |parameters: &str| with_parameters(claim("bad", &["slot-0"]), &[], parameters);
    let outcome = prepare(loaded, &with(r#"{"mode": "löud"}"#)).await;
    let message = is_refusal(outcome, ProblemKind::Invalid, "no-such-mode");
    assert_eq!(message, "mode \"löud\" is not one of normal, quiet");
    for parameters in [
        "",
        "[]",
        "{",
        "null",
        r#""quiet""#,
        r#"{"mode": 1}"#,
        r#"{"made": "quiet"}"#,
        r#"{"mode": "quiet"} x"#,
    ] {
        is_refusal(
            prepare(loaded, &with(parameters)).await,
            ProblemKind::Invalid,
            "bad-parameters",
        );
    }
    let outcome = prepare(loaded, &claim("none", &["slot-9"])).await;
    let message = is_refusal(outcome, ProblemKind::NotFound, "no-such-device");
    assert_eq!(message, "there is no slots/slot-9");
}

async fn gives_each_claim_its_own_outcome(loaded: &Loaded) {
    let claims = [
        claim("good", &["slot-0"]),
        claim("bad", &["slot-9"]),
        claim("fine", &["slot-1"]),
    ];
    let outcomes = loaded.driver.prepare(&call(), &claims).await;
    assert_eq!(outcomes.len(), 3);
    for claim in &claims {
        assert_eq!(
            outcomes[&claim.id.uid].is_ok(),
            claim.id.uid.as_str() != "bad",
            "{outcomes:?}"
        );
    }
    assert!(loaded.driver.prepare(&call(), &[]).await.is_empty());
}

async fn knows_its_claims_by_the_ledger(loaded: &Loaded) {
    let known = claim("known", &["slot-0"]);
    let memo = b"slot-0 normal\n";
    loaded.bench.claims.keep(live(known.clone(), memo));
    assert_eq!(prepare(loaded, &known).await.expect("prepare").memo, memo);
    let otherwise = with_parameters(known, &[], QUIET);
    is_refusal(
        prepare(loaded, &otherwise).await,
        ProblemKind::Invalid,
        "prepared-otherwise",
    );
}

async fn unprepares_by_the_memo(loaded: &Loaded) {
    let claim = || claim("pair", &["slot-0", "slot-1"]);
    let memo = prepare(loaded, &claim()).await.expect("prepare").memo;
    assert_eq!(unprepare(loaded, &live(claim(), &memo)).await, Ok(()));
    assert_eq!(
        unprepare(loaded, &live(claim(), b"")).await,
        Ok(()),
        "an unknown claim is success"
    );
    for memo in [
        &b"slot-9 normal\n"[..],
        b"slot-0 loud\n",
        b"{}",
        b"\xff\xfe\0",
    ] {
        is_refusal(
            unprepare(loaded, &live(claim(), memo)).await,
            ProblemKind::Internal,
            "bad-memo",
        );
    }
}

async fn answers_twenty_calls_at_once(loaded: &Loaded) {
    let claims: Vec<_> = (0..20)
        .map(|i| claim(&format!("at-once-{i}"), &["slot-1"]))
        .collect();
    let outcomes = join_all(claims.iter().map(|claim| prepare(loaded, claim))).await;
    for outcome in outcomes {
        assert_eq!(outcome.expect("prepare").memo, b"slot-1 normal\n");
    }
}

fn stays_within_the_default_limits(Loaded { driver, .. }: &Loaded) {
    let stats = driver.stats();
    let others = Outcome::ALL
        .iter()
        .filter(|outcome| **outcome != Outcome::Answered);
    assert_eq!(
        others.map(|outcome| stats.ended(*outcome)).sum::<u64>(),
        0,
        "{stats:?}"
    );
    assert!(stats.ended(Outcome::Answered) > 0, "{stats:?}");
    let refusals: u64 = Limit::ALL
        .iter()
        .map(|limit| stats.refusals(*limit).get())
        .sum();
    assert_eq!((refusals, stats.answers_refused.get()), (0, 0), "{stats:?}");
    assert!(stats.peak_memory.get() <= CALL_MEMORY as u64, "{stats:?}");
}

/// Prints the cost for the table in `docs/drivers-in-other-languages.md`; shown with `--nocapture`.
async fn tells_what_it_costs(Loaded { golden, driver, .. }: &Loaded) {
    let mut times = Vec::new();
    for _ in 0..20 {
        let began = Instant::now();
        driver
            .discover(&call(), Trigger::Timer)
            .await
            .expect("discover");
        times.push(began.elapsed());
    }
    let (first, peak) = (times[0], driver.stats().peak_memory.get() >> 10);
    let least = times.iter().min().expect("there are twenty");
    let bytes = golden.bytes().expect("it was loaded");
    let (
        build,
        size,
        Spent {
            cpu_ms,
            memory_peak_mib,
            kept,
        },
    ) = (golden.build, bytes.len(), Spent::on(&bytes));
    println!(
        "{build}: {size} bytes, kept as {kept}, compiled in {cpu_ms} ms of CPU and {memory_peak_mib} MiB"
    );
    println!(
        "{build}: {peak} KiB at most, discover in {least:?} at best, {first:?} the first time"
    );
}
