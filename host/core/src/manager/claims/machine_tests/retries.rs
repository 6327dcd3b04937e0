//! Times at which drivers are called again: retries of prepares, and of unprepares of claims with several drivers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::super::fixtures::{allocation, claim, driver, permanent, transient, uid};
use crate::driver::{Driver, DriverIdentity};
use crate::manager::claims::RETRY_AFTER_MAX;
use crate::manager::claims::machine::PrepareStep;
use crate::manager::claims::prepare_retry::{
    CallAdmission, DriverRevision, FailedPrepare, PREPARE_RETRY_MAX, PrepareRetries, REFUSALS_MAX,
    admission,
};
use crate::manager::claims::unprepare_retry::{
    COMMIT_RETRY_MAX, Serving, UNPREPARE_RETRY_MAX, UNPREPARE_RETRY_MIN, UnprepareRetries,
};
use nodedock_model::{
    AllocatedDevice, ClaimRecord, ClaimState, ConfigSource, DriverClaim, DriverKind, DriverPart,
    OpaqueConfig, Problem,
};

/// A driver as it is loaded or registered: each time another one.
fn loaded(short: &str, kind: DriverKind) -> Driver {
    let identity = DriverIdentity {
        name: driver(short),
        kind,
        version: "1.0.0".to_owned(),
        digest: String::new(),
        source: short.to_owned(),
        summary: String::new(),
    };
    Driver {
        identity: Arc::new(identity),
        claims: None,
        inventory: None,
    }
}

fn request(name: &str, devices: &[&str]) -> DriverClaim {
    let devices: Vec<AllocatedDevice> = allocation(devices).devices;
    DriverClaim {
        id: claim(name, &[], &[]).id,
        devices,
        configs: Vec::new(),
        annotations: BTreeMap::new(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

/// PrepareRetries of one driver, with a clock that is turned.
struct Story {
    retries: PrepareRetries,
    driver: Driver,
    now: Instant,
}

impl Story {
    fn new(kind: DriverKind) -> Self {
        Self {
            retries: PrepareRetries::default(),
            driver: loaded("gpu", kind),
            now: Instant::now(),
        }
    }

    fn refuse(&mut self, request: &DriverClaim, problem: &Problem) {
        let (driver, revision) = (
            &self.driver.identity.name,
            &DriverRevision::of(&self.driver),
        );
        self.retries.note(
            &FailedPrepare {
                pod: None,
                request,
                driver,
                revision,
                problem,
            },
            self.now,
            1,
        );
    }

    fn admission_of(&self, request: &DriverClaim) -> CallAdmission {
        let (driver, revision) = (&self.driver.identity.name, DriverRevision::of(&self.driver));
        self.retries.admission_of(
            &request.id.uid,
            driver,
            &revision,
            || request.clone(),
            self.now,
        )
    }

    /// Returns the remaining delay.
    #[track_caller]
    fn waits_for(&self, request: &DriverClaim) -> Duration {
        match self.admission_of(request) {
            CallAdmission::Later { at, problem } => {
                let rounded = Duration::from_millis(problem.retry_after_ms.expect("a time").into());
                assert!(
                    rounded >= at - self.now && rounded < at - self.now + Duration::from_millis(1),
                    "{rounded:?}"
                );
                at - self.now
            }
            other => panic!("it was to wait: {other:?}"),
        }
    }
}

#[test]
fn final_refusal_lasts_until_request_changes() {
    let mut story = Story::new(DriverKind::Wasm);
    let asked = request("one", &["gpu/0"]);
    story.refuse(&asked, &permanent());
    story.now += Duration::from_secs(1_000_000);
    assert_eq!(
        story.admission_of(&asked),
        CallAdmission::Never(permanent())
    );

    let mut others = [
        request("one", &["gpu/1"]),
        asked.clone(),
        asked.clone(),
        request("two", &["gpu/0"]),
    ];
    let parameters = "{}".to_owned();
    let config = OpaqueConfig {
        source: ConfigSource::Claim,
        requests: vec![],
        driver: driver("gpu"),
        parameters,
    };
    others[1].configs.push(config);
    others[2]
        .annotations
        .insert("mode".to_owned(), "fast".to_owned());
    for other in others {
        assert_eq!(story.admission_of(&other), CallAdmission::Call, "{other:?}");
    }
    let nic = loaded("nic", DriverKind::Wasm);
    let of_another = story.retries.admission_of(
        &asked.id.uid,
        &nic.identity.name,
        &DriverRevision::of(&nic),
        || asked.clone(),
        story.now,
    );
    assert_eq!(of_another, CallAdmission::Call);
}

#[test]
fn retry_delays_double_up_to_maximum() {
    let mut story = Story::new(DriverKind::Wasm);
    let asked = request("one", &["gpu/0"]);
    story.refuse(&asked, &transient());
    assert_eq!(story.admission_of(&asked), CallAdmission::Call);
    let mut delays = Vec::new();
    for _ in 0..10 {
        story.refuse(&asked, &transient());
        let delay = story.waits_for(&asked);
        story.now += delay;
        assert_eq!(story.admission_of(&asked), CallAdmission::Call);
        delays.push(delay.as_millis());
    }
    assert_eq!(
        delays,
        [
            250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000
        ]
    );
    assert_eq!(
        story
            .retries
            .get(&asked.id.uid, &driver("gpu"))
            .map(|refusal| refusal.attempts),
        Some(11)
    );
}

#[test]
fn driver_retry_delay_applies_within_bounds() {
    let mut story = Story::new(DriverKind::Wasm);
    let asked = request("one", &["gpu/0"]);
    story.refuse(&asked, &transient().retry_after(Duration::from_secs(90)));
    assert_eq!(
        story.waits_for(&asked),
        Duration::from_secs(90),
        "of the first refusal too"
    );
    story.now += Duration::from_secs(30);
    assert_eq!(story.waits_for(&asked), Duration::from_secs(60));
    story.refuse(
        &asked,
        &transient().retry_after(Duration::from_secs(u64::from(u32::MAX))),
    );
    assert_eq!(story.waits_for(&asked), RETRY_AFTER_MAX);
}

#[test]
fn oldest_refusal_is_evicted_when_full() {
    let mut story = Story::new(DriverKind::Wasm);
    let asked: Vec<_> = (0..=REFUSALS_MAX)
        .map(|n| request(&format!("c-{n}"), &["gpu/0"]))
        .collect();
    for index in (0..REFUSALS_MAX).chain([0, REFUSALS_MAX]) {
        story.refuse(&asked[index], &permanent());
    }
    let asks = [0, 1, 2, REFUSALS_MAX]
        .map(|index| story.admission_of(&asked[index]) == CallAdmission::Call);
    assert_eq!(
        asks,
        [false, true, false, false],
        "the first was refused again meanwhile"
    );
}

#[test]
fn drivers_of_claim_decide_together() {
    let (now, record) = (Instant::now(), Arc::new(leaving(&["gpu", "nic"])));
    let later = |ms| {
        let at = now + Duration::from_millis(ms);
        CallAdmission::Later {
            at,
            problem: Problem::unavailable(format!("in-{ms}"), "not now"),
        }
    };
    let decide = |gpu, nic| match admission(
        record.clone(),
        vec![(driver("gpu"), gpu), (driver("nic"), nic)],
        now,
    ) {
        PrepareStep::Call { record, drivers } => {
            let code = record.drivers[&driver("nic")]
                .problem
                .as_ref()
                .map(|problem| problem.code.clone());
            format!("calls {}, nic: {}", drivers.len(), code.unwrap_or_default())
        }
        PrepareStep::Wait { at, .. } => format!("waits {} ms", (at.unwrap() - now).as_millis()),
        PrepareStep::Refuse(problem) => format!("refused: {}", problem.code),
        PrepareStep::Known { .. } => unreachable!("the claim is not prepared"),
    };
    for (gpu, nic, expected) in [
        (
            CallAdmission::Call,
            CallAdmission::Call,
            "calls 2, nic: device-busy",
        ),
        (
            CallAdmission::Call,
            CallAdmission::Never(permanent()),
            "refused: bad-parameters",
        ),
        (
            later(9000),
            CallAdmission::Never(permanent()),
            "refused: bad-parameters",
        ),
        (CallAdmission::Call, later(9000), "calls 1, nic: in-9000"),
        // The problem of the driver that may be called first.
        (later(9000), later(3000), "refused: in-3000"),
        (CallAdmission::Call, later(200), "waits 200 ms"),
    ] {
        assert_eq!(decide(gpu, nic), expected);
    }
}

/// A claim that is being unprepared, with these drivers left.
fn leaving(drivers: &[&str]) -> ClaimRecord {
    let part = DriverPart {
        problem: Some(transient()),
        ..DriverPart::default()
    };
    let drivers = drivers
        .iter()
        .map(|name| (driver(name), Box::new(part.clone())))
        .collect();
    ClaimRecord {
        drivers,
        ..ClaimRecord::new(claim("one", &[], &[]).id, ClaimState::Unpreparing, "boot")
    }
}

fn serving(drivers: &[&Driver]) -> Serving {
    drivers
        .iter()
        .map(|driver| (driver.identity.name.clone(), DriverRevision::of(driver)))
        .collect()
}

#[test]
fn unprepare_is_retried_when_driver_returns() {
    let (gpu, nic) = (
        loaded("gpu", DriverKind::Wasm),
        loaded("nic", DriverKind::Wasm),
    );
    let (record, mut retries, mut now) = (
        leaving(&["gpu", "nic"]),
        UnprepareRetries::default(),
        Instant::now(),
    );
    assert_eq!(
        retries.next(&record, &serving(&[]), now),
        None,
        "no driver serves"
    );
    assert_eq!(retries.next(&record, &serving(&[&gpu]), now), Some(now));
    let wanted = transient().retry_after(Duration::from_secs(20));
    retries.failed(
        &uid("uid-one"),
        serving(&[&gpu]),
        &BTreeMap::from([(driver("gpu"), wanted)]),
        UNPREPARE_RETRY_MAX,
        now,
    );
    assert_eq!(
        retries.next(&record, &serving(&[&gpu]), now),
        Some(now + Duration::from_secs(20))
    );
    assert_eq!(
        retries.next(&record, &serving(&[&gpu, &nic]), now),
        Some(now),
        "the nic just came"
    );
    assert_eq!(
        retries.drivers(&record, &serving(&[&gpu, &nic]), now),
        [driver("nic")]
    );
    assert_eq!(
        retries.drivers(&record, &serving(&[&nic]), now),
        [driver("nic")],
        "the gpu is known to be gone"
    );

    now += Duration::from_secs(1);
    retries.failed(
        &uid("uid-one"),
        serving(&[&gpu, &nic]),
        &BTreeMap::from([(driver("nic"), transient())]),
        UNPREPARE_RETRY_MAX,
        now,
    );
    let both = serving(&[&gpu, &nic]);
    assert_eq!(
        retries.next(&record, &both, now),
        Some(now + 2 * UNPREPARE_RETRY_MIN)
    );
    assert_eq!(
        retries.due(&uid("uid-one"), &driver("gpu"), &both[&driver("gpu")]),
        Some(now + Duration::from_secs(19))
    );
    assert_eq!(retries.attempts(&uid("uid-one")), 2);
    let reloaded = loaded("gpu", DriverKind::Wasm);
    assert_eq!(
        retries.drivers(&record, &serving(&[&reloaded, &nic]), now),
        [driver("gpu")],
        "it may be better now"
    );
    retries.clear(&uid("uid-one"));
    assert_eq!(retries.attempts(&uid("uid-one")), 0);
}

#[test]
fn failures_count_per_driver_version() {
    let (gpu, nic) = (
        loaded("gpu", DriverKind::Wasm),
        loaded("nic", DriverKind::Wasm),
    );
    let (one, mut retries, now) = (uid("uid-one"), UnprepareRetries::default(), Instant::now());
    let tries = |retries: &UnprepareRetries, of: &Driver| {
        retries.tries(&one, &of.identity.name, &DriverRevision::of(of))
    };
    let refused = |name: &str| BTreeMap::from([(driver(name), transient())]);
    retries.failed(
        &one,
        serving(&[&gpu]),
        &refused("nic"),
        UNPREPARE_RETRY_MAX,
        now,
    );
    assert_eq!(
        (tries(&retries, &gpu), tries(&retries, &nic)),
        (0, 0),
        "the nic was not there"
    );
    for expected in 1..=2 {
        retries.failed(
            &one,
            serving(&[&gpu, &nic]),
            &refused("nic"),
            UNPREPARE_RETRY_MAX,
            now,
        );
        assert_eq!(
            (tries(&retries, &gpu), tries(&retries, &nic)),
            (0, expected)
        );
    }
    let reloaded = loaded("nic", DriverKind::Wasm);
    assert_eq!((tries(&retries, &reloaded), retries.attempts(&one)), (0, 3));
    retries.failed(
        &one,
        serving(&[&gpu, &reloaded]),
        &refused("gpu"),
        UNPREPARE_RETRY_MAX,
        now,
    );
    assert_eq!(
        (
            tries(&retries, &gpu),
            tries(&retries, &reloaded),
            tries(&retries, &nic)
        ),
        (1, 0, 0)
    );
}

#[test]
fn driverless_unprepare_is_retried_with_delays() {
    let (record, mut retries, now) = (leaving(&[]), UnprepareRetries::default(), Instant::now());
    assert_eq!(retries.next(&record, &Serving::new(), now), Some(now));
    let mut fail = |delay_max| {
        let (one, no_problem) = (uid("uid-one"), BTreeMap::new());
        retries.failed(&one, Serving::new(), &no_problem, delay_max, now);
        retries.next(&record, &Serving::new(), now)
    };
    assert_eq!(fail(UNPREPARE_RETRY_MAX), Some(now + UNPREPARE_RETRY_MIN));
    for _ in 0..10 {
        fail(UNPREPARE_RETRY_MAX);
    }
    assert_eq!(fail(UNPREPARE_RETRY_MAX), Some(now + UNPREPARE_RETRY_MAX));
    // As soon as the checkpoint takes writes again, however often it took none.
    assert_eq!(fail(COMMIT_RETRY_MAX), Some(now + COMMIT_RETRY_MAX));
}

#[derive(Debug, Clone)]
enum Event {
    Asked {
        permanent: bool,
        after_ms: Option<u32>,
    },
    Later {
        ms: u64,
    },
    LoadedAgain,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (prop::bool::weighted(0.1), prop::option::weighted(0.3, 0..20_000u32))
            .prop_map(|(permanent, after_ms)| Event::Asked { permanent, after_ms }),
        3 => (0..90_000u64).prop_map(|ms| Event::Later { ms }),
        1 => Just(Event::LoadedAgain),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// A client that requests whenever it may: the driver is not called before its time, nor later than after the longest delay.
    #[test]
    fn driver_calls_respect_retry_delays(
        events in prop::collection::vec(event(), 1..60),
        kind in prop_oneof![Just(DriverKind::Wasm), Just(DriverKind::Grpc)],
    ) {
        let mut story = Story::new(kind);
        let asked = request("one", &["gpu/0"]);
        // Since the driver was loaded: the time of each call, the delay that it named, and whether it refused for good.
        let mut calls: Vec<(Instant, Option<Duration>, bool)> = Vec::new();
        for event in events {
            match event {
                Event::Later { ms } => story.now += Duration::from_millis(ms),
                Event::LoadedAgain => {
                    story.driver = loaded("gpu", kind);
                    calls.clear();
                }
                Event::Asked { permanent: for_good, after_ms } => {
                    let admission = story.admission_of(&asked);
                    let last = calls.last().copied();
                    let may = admission == CallAdmission::Call;
                    if let Some((at, wanted, lasts)) = last {
                        let passed = story.now - at;
                        prop_assert_eq!(lasts, matches!(admission, CallAdmission::Never(_)));
                        prop_assert!(!may || wanted.is_none_or(|wanted| passed >= wanted));
                        prop_assert!(may || lasts || passed < wanted.unwrap_or(PREPARE_RETRY_MAX));
                    } else {
                        prop_assert!(may, "no driver was called yet");
                    }
                    if may {
                        let mut problem = if for_good { permanent() } else { transient() };
                        problem.retry_after_ms = after_ms;
                        story.refuse(&asked, &problem);
                        let wanted = after_ms.map(|ms| Duration::from_millis(ms.into()));
                        calls.push((story.now, wanted, for_good && kind == DriverKind::Wasm));
                    }
                }
            }
            let free = calls.windows(2).filter(|two| two[0].0 == two[1].0 && two[0].1 != Some(Duration::ZERO));
            prop_assert!(free.count() <= 1, "one retry at once");
        }
    }
}
