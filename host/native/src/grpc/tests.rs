//! Tests with a scripted plugin.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use native_null::{
    Device, DeviceHealth as Said, Event, HealthState as SaidState, Operation, Options, Plugin,
    Script, ScriptedOutcome,
};
use tokio::sync::Notify;
use tonic::Code;

use super::*;
use crate::grpc::tap::tests::Recorded;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, ClaimDriver};
use nodedock_core::recording::CallOutcome::{Failed, Returned};
use nodedock_model::rule::is_unprintable;
use nodedock_model::{
    AllocatedDevice, DeviceAccess, DeviceName, DriverClaim, DriverClaimRecord, DriverName,
    HealthReport, HealthState, ObjectRef, PoolName, PreparedClaim, Problem, ProblemKind,
};

const DRIVER: &str = "null.example.com";

struct Bench {
    _dir: tempfile::TempDir,
    plugin: Plugin,
    connection: Connection,
    tasks: Tasks,
    driver: DraPlugin,
}

impl Bench {
    fn new(script: Script) -> Self {
        Self::with(script, DraService::V1, |_| ())
    }

    fn with(script: Script, service: DraService, change: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options =
            Options::new(DRIVER, &dir.path().join("reg"), &dir.path().join("plugins"));
        change(&mut options);
        let plugin = Plugin::unregistered(options, script).unwrap();
        let tasks = Tasks::new();
        let connection = Connection::open(plugin.endpoint().to_owned(), &tasks);
        let name = DriverName::new(DRIVER).unwrap();
        let caller = Caller {
            name,
            connection: connection.clone(),
            rpcs: Rpcs::default(),
            tap: Tap::default(),
        };
        let driver = DraPlugin { caller, service };
        Self {
            _dir: dir,
            plugin,
            connection,
            tasks,
            driver,
        }
    }

    async fn prepare(&self, uid: &str) -> Result<PreparedClaim, Problem> {
        self.prepare_within(uid, Duration::from_secs(30)).await
    }

    async fn prepare_within(
        &self,
        uid: &str,
        deadline: Duration,
    ) -> Result<PreparedClaim, Problem> {
        let claim = claim(uid);
        let mut outcomes = self
            .driver
            .prepare(&call(deadline), std::slice::from_ref(&claim))
            .await;
        assert_eq!(
            outcomes.len(),
            1,
            "an outcome for each claim asked for, and no other"
        );
        outcomes.remove(uid).unwrap()
    }

    async fn refusal(script: Script) -> Problem {
        Self::new(script).prepare("c1").await.unwrap_err()
    }

    /// Waits until the link satisfies a condition.
    async fn link(&self, wanted: &str) {
        let mut connection = self.connection.clone();
        while connection.link().as_str() != wanted {
            connection.changed().await;
        }
    }
}

fn call(deadline: Duration) -> Call {
    Call {
        request_id: "r-1".into(),
        deadline,
    }
}

fn claim(uid: &str) -> DriverClaim {
    let device = AllocatedDevice {
        request: "gpu/big".into(),
        driver: DriverName::new(DRIVER).unwrap(),
        pool: PoolName::new("null").unwrap(),
        device: DeviceName::new("null-0").unwrap(),
        share_id: None,
        consumed: Default::default(),
        admin_access: false,
        binding: Default::default(),
    };
    DriverClaim {
        id: ObjectRef::new("default", &format!("claim-{uid}"), uid).unwrap(),
        devices: vec![device],
        configs: Vec::new(),
        annotations: Default::default(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

fn live(uid: &str) -> DriverClaimRecord {
    DriverClaimRecord {
        claim: claim(uid),
        prepared: true,
        memo: Vec::new(),
        driver_version: "v1".into(),
        boot_id: "b".into(),
    }
}

fn device(cdi_names: &[&str]) -> Device {
    let cdi_names = cdi_names.iter().map(|name| (*name).to_owned()).collect();
    Device {
        pool: "null".into(),
        device: "null-0".into(),
        cdi_names,
        ..Device::default()
    }
}

fn devices(devices: Vec<Device>) -> Script {
    Script::prepare(ScriptedOutcome::Devices(devices))
}

fn cdi_names(prepared: &PreparedClaim) -> Vec<Vec<String>> {
    let names = |device: &nodedock_model::PreparedDevice| match &device.access {
        DeviceAccess::CdiDevices(names) => names.clone(),
        other => panic!("{other:?}"),
    };
    prepared.devices.iter().map(names).collect()
}

#[tokio::test]
async fn call_carries_claim_id_and_deadline() {
    for (service, name) in [(DraService::V1, "v1"), (DraService::V1beta1, "v1beta1")] {
        let bench = Bench::with(Script::ok(DRIVER), service, |_| ());
        let prepared = bench.prepare("c1").await.unwrap();
        assert_eq!(cdi_names(&prepared), [["null.example.com/null=c1"]]);
        let Event::Called {
            operation,
            service,
            claims,
            request_id,
            deadline,
        } = bench.plugin.event().await
        else {
            panic!("no call");
        };
        assert_eq!(
            (operation, service, request_id.as_str()),
            (Operation::Prepare, name, "r-1")
        );
        assert_eq!(
            (
                claims[0].namespace.as_str(),
                claims[0].name.as_str(),
                claims[0].uid.as_str()
            ),
            ("default", "claim-c1", "c1")
        );
        assert!(deadline.is_some());
    }
}

#[tokio::test]
async fn each_claim_has_its_own_outcome() {
    let script = Script::new(|_, claim| match claim.uid.as_str() {
        "bad" => ScriptedOutcome::Error("no such GPU".into()),
        "gone" => ScriptedOutcome::Skip,
        _ => ScriptedOutcome::Devices(vec![device(&["v/c=1"])]),
    });
    let bench = Bench::new(script);
    let claims = [claim("good"), claim("bad"), claim("gone")];
    let outcomes = bench
        .driver
        .prepare(&call(Duration::from_secs(30)), &claims)
        .await;
    assert!(outcomes["good"].is_ok());
    let refused = outcomes["bad"].as_ref().unwrap_err();
    assert_eq!(
        (refused.kind, refused.code.as_str()),
        (ProblemKind::Unavailable, "driver-refused")
    );
    assert!(refused.message.contains("no such GPU"), "{refused}");
    assert_eq!(outcomes["gone"].as_ref().unwrap_err().code, "claim-skipped");
    let unprepared = bench
        .driver
        .unprepare(&call(Duration::from_secs(30)), &[live("good"), live("bad")])
        .await;
    assert_eq!(
        (unprepared["good"].is_ok(), unprepared["bad"].is_err()),
        (true, true)
    );
}

#[tokio::test]
async fn duplicate_claim_answer_is_refused() {
    assert_eq!(
        Bench::refusal(Script::prepare(ScriptedOutcome::Twice(vec![device(&[
            "v/c=1"
        ])])))
        .await
        .code,
        "claim-answered-twice"
    );
    let bench = Bench::new(Script::prepare(ScriptedOutcome::Stranger(
        "another-claim".into(),
        Vec::new(),
    )));
    assert_eq!(bench.prepare("c1").await.unwrap(), PreparedClaim::default());
}

#[tokio::test]
async fn repeated_devices_are_merged() {
    let first = Device {
        requests: vec!["gpu/big".into(), "gpu".into()],
        ..device(&["v/c=1", "v/c=1"])
    };
    let again = Device {
        requests: vec!["gpu".into()],
        ..device(&["v/c=1", "v/c=2"])
    };
    let share = Device {
        share_id: Some("6f1c2d7e-0f7b-4d1f-9d3b-2a6f0e9c1b11".into()),
        ..again.clone()
    };
    let prepared = Bench::new(devices(vec![first, again, share]))
        .prepare("c1")
        .await
        .unwrap();
    assert_eq!(
        cdi_names(&prepared),
        [["v/c=1", "v/c=2"], ["v/c=1", "v/c=2"]]
    );
    assert_eq!(prepared.devices[0].requests, ["gpu"]);
    assert_eq!(prepared.devices[0].share_id, None);
    assert!(prepared.devices[1].share_id.is_some());
}

#[tokio::test]
async fn unallocated_device_is_accepted() {
    let other = Device {
        pool: "elsewhere".into(),
        device: "other".into(),
        ..device(&["v/c=1"])
    };
    let prepared = Bench::new(devices(vec![other]))
        .prepare("c1")
        .await
        .unwrap();
    assert_eq!(prepared.devices[0].pool.as_str(), "elsewhere");
}

#[tokio::test]
async fn invalid_answers_name_the_broken_rule() {
    let many = |count: usize| {
        (0..count)
            .map(|index| format!("v/c={index}"))
            .collect::<Vec<_>>()
    };
    let cases = [
        (
            Device {
                pool: "Not A Pool".into(),
                ..device(&[])
            },
            "pool name",
        ),
        (
            Device {
                device: String::new(),
                ..device(&[])
            },
            "device name",
        ),
        (device(&["no-cdi-name"]), "VENDOR/CLASS=NAME"),
        (device(&["v/c=a\nb"]), "VENDOR/CLASS=NAME"),
        (
            Device {
                share_id: Some("../x".into()),
                ..device(&[])
            },
            "share",
        ),
        (
            Device {
                requests: vec!["a b".into()],
                ..device(&[])
            },
            "request",
        ),
        (
            Device {
                cdi_names: many(100),
                ..device(&[])
            },
            "at most 64",
        ),
    ];
    for (device, rule) in cases {
        let problem = Bench::refusal(devices(vec![device])).await;
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Internal, "driver-answer-not-valid")
        );
        assert!(problem.message.contains(rule), "{problem}");
        assert!(!problem.message.contains('\n'));
    }
    let problem = Bench::refusal(devices(vec![device(&["v/c=1"]); 300])).await;
    assert!(problem.message.contains("at most 256"), "{problem}");
}

#[tokio::test]
async fn an_answer_without_devices_is_success() {
    assert_eq!(
        Bench::new(devices(Vec::new())).prepare("c1").await.unwrap(),
        PreparedClaim::default()
    );
}

#[tokio::test]
async fn errors_keep_kind_and_one_line() {
    let status = |code, text: &str| Script::prepare(ScriptedOutcome::Status(code, text.into()));
    let cases = [
        (
            Code::Unavailable,
            ProblemKind::Unavailable,
            "driver-unavailable",
        ),
        (
            Code::DeadlineExceeded,
            ProblemKind::Unavailable,
            "driver-deadline",
        ),
        (Code::Cancelled, ProblemKind::Unavailable, "driver-deadline"),
        (Code::Unknown, ProblemKind::Unavailable, "driver-refused"),
        (
            Code::InvalidArgument,
            ProblemKind::Invalid,
            "driver-refused",
        ),
        (Code::NotFound, ProblemKind::NotFound, "driver-refused"),
        (
            Code::PermissionDenied,
            ProblemKind::Denied,
            "driver-refused",
        ),
        (Code::Aborted, ProblemKind::Conflict, "driver-refused"),
        (Code::Internal, ProblemKind::Internal, "driver-failed"),
    ];
    for (code, kind, name) in cases {
        let problem = Bench::refusal(status(code, "why")).await;
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (kind, name),
            "{code:?}"
        );
        assert!(problem.message.contains("why"), "{problem}");
        // The plugin may end a call at the deadline before the host does.
        let is_late = matches!(code, Code::DeadlineExceeded | Code::Cancelled);
        assert_eq!(
            problem.message.contains("did not answer"),
            is_late,
            "{problem}"
        );
    }
    let long = format!("line\nline\u{7}{}", "x".repeat(20_000));
    for script in [
        status(Code::Unknown, &long),
        Script::prepare(ScriptedOutcome::Error(long)),
    ] {
        let problem = Bench::refusal(script).await;
        assert!(problem.message.len() <= 1024 && !problem.message.contains(is_unprintable));
        assert!(problem.message.contains("line line"), "{problem}");
    }
}

#[tokio::test]
async fn oversized_answer_fails_only_its_call() {
    let bench = Bench::new(Script::prepare(ScriptedOutcome::Huge(5 << 20)));
    let problem = bench.prepare("c1").await.unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Internal, "driver-answer-too-large")
    );
    bench.plugin.set_script(Script::ok(DRIVER));
    assert!(bench.prepare("c1").await.is_ok());
}

#[tokio::test]
async fn hanging_plugin_delays_no_other() {
    let stuck = Bench::new(Script::prepare(ScriptedOutcome::Hang));
    let good = Bench::new(Script::ok(DRIVER));
    // Else a slow connection uses up the short deadline.
    stuck.link("connected").await;
    let release = Arc::new(Notify::new());
    good.plugin
        .set_script(Script::prepare(ScriptedOutcome::After(
            release.clone(),
            Box::new(ScriptedOutcome::Devices(Vec::new())),
        )));
    let (problem, prepared) = tokio::join!(
        stuck.prepare_within("c1", Duration::from_millis(100)),
        async {
            release.notify_one();
            good.prepare("c2").await
        }
    );
    assert!(prepared.is_ok());
    let problem = problem.unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "driver-deadline")
    );
}

#[tokio::test]
async fn missing_service_is_named() {
    let bench = Bench::with(Script::ok(DRIVER), DraService::V1, |options| {
        options.versions.v1 = false
    });
    assert_eq!(
        bench.prepare("c1").await.unwrap_err().code,
        "driver-without-service"
    );
}

#[tokio::test]
async fn connection_returns_after_plugin_restart() {
    let bench = Bench::new(Script::prepare(ScriptedOutcome::Die));
    bench.link("connected").await;
    let problem = bench.prepare("c1").await.unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "driver-unavailable")
    );
    bench.link("lost").await;
    let problem = bench
        .prepare_within("c1", Duration::from_millis(10))
        .await
        .unwrap_err();
    assert_eq!(problem.code, "driver-not-connected");
    let mut options = Options::new(
        DRIVER,
        &PathBuf::from("/nowhere"),
        &PathBuf::from("/nowhere"),
    );
    options.endpoint = bench.plugin.endpoint().to_owned();
    let _again = Plugin::unregistered(options, Script::ok(DRIVER)).unwrap();
    // The call waits for the connection.
    assert!(bench.prepare("c1").await.is_ok());
}

#[tokio::test]
async fn connection_closes_with_its_tasks() {
    let bench = Bench::new(Script::ok(DRIVER));
    bench.link("connected").await;
    bench.tasks.stop();
    bench.link("closed").await;
    assert_eq!(
        bench.prepare("c1").await.unwrap_err().code,
        "driver-not-connected"
    );
}

fn health(device: &str, state: SaidState, message: &str) -> Said {
    Said {
        pool: "null".into(),
        device: device.into(),
        state,
        timeout_seconds: 0,
        message: message.into(),
    }
}

/// The first report.
async fn reported(health_of: &Health) -> HealthReport {
    loop {
        match health_of.now() {
            report if report.is_empty() => tokio::task::yield_now().await,
            report => return report,
        }
    }
}

#[tokio::test]
async fn health_is_followed_in_either_version() {
    for (service, name) in [
        (HealthService::V1, "v1"),
        (HealthService::V1alpha1, "v1alpha1"),
    ] {
        let bench = Bench::with(Script::ok(DRIVER), DraService::V1, |options| {
            options.versions.health_v1 = true;
            options.versions.health_v1alpha1 = true;
        });
        let health_of = Health::follow(
            bench.driver.caller.name.clone(),
            service,
            bench.connection.clone(),
            Tap::default(),
            &bench.tasks,
        );
        assert_eq!(bench.plugin.event().await, Event::HealthWatched(name));
        bench.plugin.report_health(vec![
            health("null-0", SaidState::Unhealthy, "too hot\n"),
            health("NOT A NAME", SaidState::Healthy, ""),
        ]);
        let report = reported(&health_of).await;
        let key = (
            PoolName::new("null").unwrap(),
            DeviceName::new("null-0").unwrap(),
        );
        assert_eq!(
            (report.len(), report[&key].state),
            (1, HealthState::Unhealthy)
        );
        assert_eq!(report[&key].message, "too hot ");
    }
}

#[tokio::test]
async fn calls_and_health_share_one_connection() {
    let bench = Bench::with(Script::ok(DRIVER), DraService::V1, |options| {
        options.versions.health_v1 = true
    });
    let (name, tasks) = (bench.driver.caller.name.clone(), &bench.tasks);
    Health::follow(
        name,
        HealthService::V1,
        bench.connection.clone(),
        Tap::default(),
        tasks,
    );
    assert_eq!(bench.plugin.event().await, Event::HealthWatched("v1"));
    let uids: Vec<_> = (0..10).map(|n| format!("c{n}")).collect();
    let prepared = futures::future::join_all(uids.iter().map(|uid| bench.prepare(uid))).await;
    assert!(prepared.iter().all(Result::is_ok), "{prepared:?}");
    assert_eq!(bench.plugin.connections(), 1);
}

#[tokio::test]
async fn broken_health_stream_is_restarted() {
    let bench = Bench::with(Script::ok(DRIVER), DraService::V1, |options| {
        options.versions.health_v1 = true
    });
    let (name, tasks) = (bench.driver.caller.name.clone(), bench.tasks.child());
    Health::follow(
        name,
        HealthService::V1,
        bench.connection.clone(),
        Tap::default(),
        &tasks,
    );
    assert_eq!(bench.plugin.event().await, Event::HealthWatched("v1"));
    bench.plugin.disconnect();
    bench.link("lost").await;
    bench.plugin.serve().unwrap();
    bench.link("connected").await;
    // From here the paused clock advances to the next stream by itself.
    tokio::time::pause();
    assert_eq!(bench.plugin.event().await, Event::HealthWatched("v1"));
    tasks.stop();
    tasks.finished().await;
}

#[tokio::test]
async fn missing_health_service_is_queried_once() {
    let bench = Bench::new(Script::ok(DRIVER));
    bench.link("connected").await;
    let tasks = Tasks::new();
    Health::follow(
        bench.driver.caller.name.clone(),
        HealthService::V1,
        bench.connection.clone(),
        Tap::default(),
        &tasks,
    );
    // It ends without a stop signal.
    tasks.finished().await;
}

#[tokio::test]
async fn recording_has_calls_and_answers() {
    let recorded = Recorded::new(DRIVER);
    let mut bench = Bench::with(Script::ok(DRIVER), DraService::V1, |options| {
        options.versions.health_v1 = true
    });
    bench.driver.caller.tap = recorded.tap();
    bench.prepare("c1").await.unwrap();
    bench
        .driver
        .unprepare(&call(Duration::from_secs(30)), &[live("c1")])
        .await["c1"]
        .as_ref()
        .unwrap();
    let mut broken = Bench::new(Script::prepare(ScriptedOutcome::Status(
        Code::Internal,
        "no\nluck".to_owned(),
    )));
    broken.driver.caller.tap = recorded.tap();
    broken.prepare("c2").await.unwrap_err();
    let calls = recorded.calls().await;
    let methods: Vec<_> = calls.iter().map(|(method, ..)| method.as_str()).collect();
    assert_eq!(
        methods,
        [
            "NodePrepareResources",
            "NodeUnprepareResources",
            "NodePrepareResources"
        ]
    );
    let (_, arguments, answer) = &calls[0];
    assert_eq!(arguments["claims"][0]["uid"], "c1");
    let Returned(answer) = answer else {
        panic!("{answer:?}")
    };
    let device = &answer["claims"][0]["value"]["devices"][0];
    assert_eq!(
        device["cdi_device_ids"][0], "null.example.com/null=c1",
        "{answer}"
    );
    let (_, _, Failed(failure)) = &calls[2] else {
        panic!("{calls:?}")
    };
    assert_eq!(
        (failure.code.as_str(), failure.message.as_str()),
        ("Internal", "no luck")
    );
    let plain = Bench::new(Script::ok(DRIVER));
    plain.prepare("c3").await.unwrap();
    assert_eq!(recorded.calls().await.len(), 3, "it is not recorded");
}

#[tokio::test]
async fn recording_includes_driver_health() {
    let recorded = Recorded::new(DRIVER);
    let bench = Bench::with(Script::ok(DRIVER), DraService::V1, |options| {
        options.versions.health_v1 = true
    });
    let (name, connection) = (bench.driver.caller.name.clone(), bench.connection.clone());
    let health_of = Health::follow(
        name,
        HealthService::V1,
        connection,
        recorded.tap(),
        &bench.tasks,
    );
    assert_eq!(bench.plugin.event().await, Event::HealthWatched("v1"));
    bench
        .plugin
        .report_health(vec![health("null-0", SaidState::Unhealthy, "too hot")]);
    reported(&health_of).await;
    let (method, _, answer) = recorded.calls().await.pop().unwrap();
    let text = serde_json::to_string(&answer).unwrap();
    assert!(
        method == "NodeWatchResources" && text.contains("too hot"),
        "{text}"
    );
}
