//! Tests with a scripted device plugin.

use std::sync::Arc;
use std::time::Duration;

use native_device_plugin::{Choice, Device, Event, Options, Plugin, Script, ScriptedOutcome};
use tokio::sync::Notify;

use super::*;
use crate::grpc::tap::tests::Recorded;
use nodedock_model::ProblemKind;

const RESOURCE: &str = "null.example.com/device";

fn resource() -> ExtendedResource {
    ExtendedResource::new(RESOURCE).unwrap()
}

struct Bench {
    _dir: tempfile::TempDir,
    plugin: Plugin,
    driver: DevicePlugin,
    tasks: Tasks,
}

impl Bench {
    async fn new(script: Script) -> Self {
        Self::with(script, |_| ()).await
    }

    async fn with(script: Script, change: impl FnOnce(&mut Options)) -> Self {
        let (dir, plugin) = plugin(script, change);
        let tasks = Tasks::new();
        let socket = plugin.options().socket();
        let connected = DevicePlugin::connect(
            &resource(),
            &socket,
            PluginTimes::default(),
            Tap::default(),
            &tasks,
        )
        .await;
        let driver = connected.unwrap();
        assert_eq!(plugin.event().await, Event::OptionsAsked);
        Self {
            _dir: dir,
            plugin,
            driver,
            tasks,
        }
    }

    async fn allocate(&self) -> Result<ContainerAllocation, Problem> {
        self.driver
            .allocate(&call(Duration::from_secs(30)), &ids(&["a", "b"]))
            .await
    }

    async fn refusal(script: Script) -> Problem {
        Self::new(script).await.allocate().await.unwrap_err()
    }
}

fn plugin(script: Script, change: impl FnOnce(&mut Options)) -> (tempfile::TempDir, Plugin) {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(RESOURCE, dir.path());
    change(&mut options);
    let plugin = Plugin::unregistered(options, script).unwrap();
    (dir, plugin)
}

async fn refused_connection(script: Script, steps: PluginTimes) -> Problem {
    let (_dir, plugin) = plugin(script, |_| ());
    let connected = DevicePlugin::connect(
        &resource(),
        &plugin.options().socket(),
        steps,
        Tap::default(),
        &Tasks::new(),
    )
    .await;
    connected.err().expect("no connection")
}

fn call(deadline: Duration) -> Call {
    Call {
        request_id: "r-1".into(),
        deadline,
    }
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

async fn next_list(following: &mut Following) -> Vec<String> {
    following.lists.changed().await.unwrap();
    let list = following.lists.borrow_and_update().clone().expect("a list");
    list.iter().map(|device| device.id.clone()).collect()
}

#[tokio::test]
async fn options_are_asked_of_the_plugin() {
    let plain = Bench::new(Script::ok()).await;
    assert_eq!(plain.driver.options(), DeviceOptions::default());
    let wanted = |options: &mut Options| options.pre_start = true;
    let both = Bench::with(Script::ok().choose(|_| Vec::new()), wanted).await;
    let expected = DeviceOptions {
        pre_start_required: true,
        preferred_allocation_available: true,
    };
    assert_eq!(both.driver.options(), expected);
}

#[tokio::test]
async fn failed_connect_names_plugin_and_reason() {
    let nowhere = std::path::Path::new("/nowhere/plugin.sock");
    let problem = DevicePlugin::connect(
        &resource(),
        nowhere,
        PluginTimes::default(),
        Tap::default(),
        &Tasks::new(),
    )
    .await;
    let problem = problem.err().expect("nothing is there");
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "driver-not-connected")
    );
    assert!(
        problem.message.contains(RESOURCE) && problem.message.contains("/nowhere/plugin.sock"),
        "{problem}"
    );

    let refusing = Script::ok().options(ScriptedOutcome::refuse("no GPU"));
    let problem = refused_connection(refusing, PluginTimes::default()).await;
    assert_eq!(problem.message, format!("device plugin {RESOURCE}: no GPU"));

    let steps = PluginTimes {
        options: Duration::from_millis(50),
        ..PluginTimes::default()
    };
    let problem = refused_connection(Script::ok().options(ScriptedOutcome::Hang), steps).await;
    assert_eq!(problem.code, "driver-deadline");
}

#[tokio::test]
async fn silent_dial_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("mute.sock");
    let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let steps = PluginTimes {
        dial: Duration::from_millis(50),
        ..PluginTimes::default()
    };
    let problem = DevicePlugin::connect(&resource(), &socket, steps, Tap::default(), &Tasks::new())
        .await
        .err()
        .unwrap();
    assert_eq!(problem.kind, ProblemKind::Unavailable);
}

#[tokio::test]
async fn allocate_carries_devices_id_and_deadline() {
    let bench = Bench::new(Script::ok()).await;
    let allocation = bench.allocate().await.unwrap();
    assert_eq!(allocation.env["NATIVE_DEVICES"], "a,b");
    let Event::Allocate {
        devices,
        request_id,
        deadline,
    } = bench.plugin.event().await
    else {
        panic!("no call");
    };
    assert_eq!(
        (devices, request_id.as_deref()),
        (ids(&["a", "b"]), Some("r-1"))
    );
    assert!(deadline.is_some());
}

#[tokio::test]
async fn bad_allocate_response_names_the_field() {
    let problem = Bench::refusal(Script::always(ScriptedOutcome::NoResponse)).await;
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Internal, "driver-answer-not-valid")
    );
    assert!(
        problem.message.contains("no container response"),
        "{problem}"
    );
    let problem = Bench::refusal(Script::always(ScriptedOutcome::bad_path())).await;
    assert!(problem.message.contains(RESOURCE), "{problem}");
    assert!(
        problem
            .message
            .contains(r#"mounts[0]: container_path "/x/../../etc""#),
        "{problem}"
    );
}

#[tokio::test]
async fn unanswered_call_meets_its_deadline() {
    let due = Arc::new(Notify::new());
    let bench = Bench::new(Script::always(ScriptedOutcome::After(
        due.clone(),
        Box::new(ScriptedOutcome::ok(&[])),
    )))
    .await;
    let short = call(Duration::from_millis(50));
    let problem = bench
        .driver
        .allocate(&short, &ids(&["a"]))
        .await
        .unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "driver-deadline")
    );
    due.notify_one();
    bench.plugin.set_script(Script::ok());
    assert!(bench.allocate().await.is_ok());
    bench.plugin.set_script(
        Script::ok()
            .choose(|_| Vec::new())
            .pre_start(|_| ScriptedOutcome::Hang),
    );
    assert_eq!(
        bench
            .driver
            .pre_start(&short, &ids(&["a"]))
            .await
            .unwrap_err()
            .code,
        "driver-deadline"
    );
}

#[tokio::test]
async fn dead_plugin_fails_every_call() {
    let bench = Bench::new(Script::always(ScriptedOutcome::Die)).await;
    assert_eq!(
        bench.allocate().await.unwrap_err().code,
        "driver-unavailable"
    );
    assert_eq!(
        bench.allocate().await.unwrap_err().kind,
        ProblemKind::Unavailable
    );
}

#[tokio::test]
async fn preference_carries_all_three_parts() {
    let bench =
        Bench::new(Script::ok().choose(|choice| choice.available.iter().rev().cloned().collect()))
            .await;
    let (available, must) = (ids(&["a", "b", "c"]), ids(&["b"]));
    let answer = bench
        .driver
        .preferred_allocation(&call(Duration::from_secs(30)), &available, &must, 2)
        .await;
    assert_eq!(answer.unwrap(), ["c", "b", "a"]);
    let asked = Choice {
        available,
        must_include: must,
        size: 2,
    };
    assert_eq!(bench.plugin.event().await, Event::Preferred(asked));
}

#[tokio::test]
async fn container_start_reports_its_devices() {
    let bench = Bench::new(Script::ok()).await;
    bench
        .driver
        .pre_start(&call(Duration::from_secs(300)), &ids(&["a"]))
        .await
        .unwrap();
    assert_eq!(
        bench.plugin.event().await,
        Event::PreStart {
            devices: ids(&["a"])
        }
    );
    bench
        .plugin
        .set_script(Script::ok().pre_start(|_| ScriptedOutcome::refuse("too hot")));
    let problem = bench
        .driver
        .pre_start(&call(Duration::from_secs(30)), &ids(&["a"]))
        .await
        .unwrap_err();
    assert!(problem.message.contains("too hot"), "{problem}");
}

#[tokio::test]
async fn lists_arrive_in_order_until_error() {
    let bench = Bench::new(Script::ok()).await;
    let mut following = bench.driver.follow("r-1".into());
    assert_eq!(bench.plugin.event().await, Event::ListWatched);
    assert_eq!(*following.lists.borrow(), None, "nothing is listed yet");
    bench
        .plugin
        .list(vec![Device::healthy("a"), Device::unhealthy("b").on(&[1])]);
    assert_eq!(next_list(&mut following).await, ["a", "b"]);
    bench.plugin.list(vec![Device::healthy("c")]);
    assert_eq!(next_list(&mut following).await, ["c"]);
    bench.plugin.fail_lists(Status::internal("driver unloaded"));
    let problem = following.end.await.unwrap();
    assert!(problem.message.contains("driver unloaded"), "{problem}");
    assert!(
        following.lists.changed().await.is_err(),
        "the lists end with the stream"
    );
}

#[tokio::test]
async fn newest_of_many_lists_is_seen() {
    let bench = Bench::new(Script::ok()).await;
    let mut following = bench.driver.follow("r-1".into());
    assert_eq!(bench.plugin.event().await, Event::ListWatched);
    for index in 0..1000 {
        bench
            .plugin
            .list(vec![Device::healthy(&format!("d{index}"))]);
    }
    let began = std::time::Instant::now();
    let mut seen = 0_u128;
    while next_list(&mut following).await != ["d999"] {
        seen += 1;
    }
    assert!(
        seen <= 1 + began.elapsed().as_millis() / limit::LIST_PACE.as_millis(),
        "{seen}"
    );
}

#[tokio::test]
async fn oversized_list_ends_the_stream() {
    let bench = Bench::new(Script::ok()).await;
    let mut following = bench.driver.follow("r-1".into());
    bench.plugin.list(
        (0..100_000)
            .map(|index| Device::healthy(&format!("device-{index}")))
            .collect(),
    );
    assert_eq!(next_list(&mut following).await.len(), 100_000);
    bench.plugin.list(
        (0..140_000)
            .map(|index| Device::healthy(&format!("device-{index:0500}")))
            .collect(),
    );
    assert_eq!(following.end.await.unwrap().code, "driver-answer-too-large");
}

#[tokio::test]
async fn invalid_list_ends_the_stream() {
    let bench = Bench::new(Script::ok()).await;
    bench
        .plugin
        .list_raw(vec![Default::default(); limit::LISTED_DEVICES_MAX + 1]);
    let problem = bench.driver.follow("r-1".into()).end.await.unwrap();
    assert_eq!(problem.code, "driver-answer-not-valid");
    assert!(
        problem.message.contains("1048577 devices, at most 1048576"),
        "{problem}"
    );
}

#[tokio::test]
async fn streams_end_with_tasks_or_listener() {
    let bench = Bench::new(Script::ok()).await;
    drop(bench.driver.follow("r-1".into()));
    bench.tasks.finished().await;
    let call = call(Duration::from_secs(30));
    let mut lists = bench.driver.list_and_watch(&call).await.unwrap();
    bench.tasks.stop();
    assert!(lists.changed().await.is_err());
}

#[tokio::test]
async fn recording_has_calls_and_answers() {
    let recorded = Recorded::new(RESOURCE);
    let mut bench = Bench::new(Script::ok()).await;
    bench.driver.tap = recorded.tap();
    let mut following = bench.driver.follow("r-2".into());
    bench.plugin.list(vec![Device::healthy("a")]);
    next_list(&mut following).await;
    bench.allocate().await.unwrap();
    bench
        .plugin
        .set_script(Script::ok().pre_start(|_| ScriptedOutcome::refuse("too hot")));
    bench
        .driver
        .pre_start(&call(Duration::from_secs(30)), &ids(&["a"]))
        .await
        .unwrap_err();
    let calls = recorded.calls().await;
    let methods: Vec<_> = calls.iter().map(|(method, ..)| method.as_str()).collect();
    assert_eq!(methods, ["ListAndWatch", "Allocate", "PreStartContainer"]);
    let texts: Vec<_> = calls
        .iter()
        .map(|(_, _, answer)| serde_json::to_string(answer).unwrap())
        .collect();
    for (text, part) in texts
        .iter()
        .zip(["\"id\":\"a\"", "NATIVE_DEVICES", "too hot"])
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}
