//! Tests with scripted plugins that register, break and return.

use std::time::Duration;

use native_device_plugin::{Device, Event, Options, Plugin, Register, Script, ScriptedOutcome};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use super::*;
use crate::endpoints::REGISTRATIONS_AT_ONCE;
use crate::grpc::RECONNECT_MIN;
use crate::plugins::Plugins;
use crate::sockets;
use nodedock_base::changes::Changes;
use nodedock_core::driver::Call;
use nodedock_core::recording::Recordings;
use nodedock_core::registry::Registry;
use nodedock_model::{ProblemCode, ProblemKind};

pub(crate) const RESOURCE: &str = "null.example.com/device";
/// Longer than any step takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn resource(name: &str) -> ExtendedResource {
    ExtendedResource::new(name).unwrap()
}

/// A report to a sink, with the number of the plugin.
#[derive(Debug, PartialEq)]
pub(crate) enum Report {
    Arrived(u64),
    Listed(u64, Vec<String>),
    Left(u64, Problem),
}

/// Records the reports, the plugins that arrived, and the resources whose plugins called.
#[derive(Clone)]
pub(crate) struct Sink {
    reports: mpsc::UnboundedSender<Report>,
    drivers: Arc<Mutex<Vec<Arc<dyn DeviceDriver>>>>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl PluginSink for Sink {
    type Id = u64;

    fn plugin_called(&self, resource: &ExtendedResource) {
        self.calls.lock().push(resource.to_string());
    }

    fn plugin_arrived(
        &self,
        _: ExtendedResource,
        _: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> u64 {
        let mut drivers = self.drivers.lock();
        drivers.push(driver);
        let id = drivers.len() as u64;
        let _ = self.reports.send(Report::Arrived(id));
        id
    }

    fn plugin_listed(&self, id: &u64, devices: &[PluginDevice]) {
        let ids = devices.iter().map(|device| device.id.clone()).collect();
        let _ = self.reports.send(Report::Listed(*id, ids));
    }

    fn plugin_left(&self, id: &u64, why: &Problem) {
        let _ = self.reports.send(Report::Left(*id, why.clone()));
    }
}

/// Endpoints with a separate directory.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) endpoints: Endpoints<Sink>,
    pub(crate) tasks: Tasks,
    reports: mpsc::UnboundedReceiver<Report>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Bench {
    pub(crate) fn new() -> Self {
        let (sender, reports) = mpsc::unbounded_channel();
        let tasks = Tasks::new();
        let sink = Sink {
            reports: sender,
            drivers: Arc::default(),
            calls: Arc::default(),
        };
        let endpoints = Endpoints::new(
            sink,
            PluginTimes::default(),
            Recordings::default(),
            tasks.clone(),
        );
        Self {
            dir: tempfile::tempdir().unwrap(),
            endpoints,
            tasks,
            reports,
        }
    }

    /// Registers the plugins in the directory `reg`, and returns their states.
    pub(crate) fn watch(&self, times: PluginTimes, changes: Changes) -> Registry {
        let (directory, tasks) = (self.dir.path().join("reg"), self.tasks.clone());
        std::fs::create_dir(&directory).unwrap();
        let (registry, endpoints) = (
            Registry::new(
                changes,
                nodedock_base::conditions::Conditions::default(),
                None,
            ),
            self.endpoints.clone(),
        );
        let recordings = Recordings::default();
        let plugins = Plugins {
            registry: registry.clone(),
            node: "node-1".to_owned(),
            endpoints,
            times,
            recordings,
            conditions: nodedock_base::conditions::Conditions::default(),
            tasks: tasks.clone(),
        };
        let (sender, events) = mpsc::channel(64);
        tasks.spawn("plugins", plugins.run(events));
        tasks.spawn("sockets", sockets::watch(directory, tasks.clone(), sender));
        registry
    }

    fn watching() -> Self {
        let bench = Self::new();
        bench.watch(PluginTimes::default(), Changes::default());
        bench
    }

    /// Starts a plugin with a registration socket.
    async fn start(&self, name: &str, device: &str) -> Plugin {
        self.start_as(RESOURCE, name, device).await
    }

    async fn start_as(&self, resource: &str, name: &str, device: &str) -> Plugin {
        let mut options = Options::new(resource, &self.dir.path().join(name));
        options.register = Register::PluginsRegistry(self.dir.path().join("reg").join(name));
        Plugin::start(options, Script::ok(), vec![Device::healthy(device)])
            .await
            .unwrap()
    }

    pub(crate) fn plugin(&self, script: Script, devices: &[&str]) -> Plugin {
        let plugin = Plugin::unregistered(Options::new(RESOURCE, self.dir.path()), script).unwrap();
        plugin.list(devices.iter().map(|id| Device::healthy(id)).collect());
        plugin
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), Problem> {
        let location = location(&self.dir, &plugin.options().endpoint);
        self.endpoints.register(&resource(RESOURCE), location).await
    }

    /// Returns the resources whose plugins called to register.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.endpoints.0.sink.calls.lock().clone()
    }

    pub(crate) async fn report(&mut self) -> Report {
        tokio::time::timeout(PATIENCE, self.reports.recv())
            .await
            .expect("no report arrives")
            .unwrap()
    }

    pub(crate) async fn arrived(&mut self) -> u64 {
        match self.report().await {
            Report::Arrived(id) => id,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn listed(&mut self, by: u64, expected: &[&str]) {
        let expected = expected.iter().map(|id| (*id).to_owned()).collect();
        assert_eq!(self.report().await, Report::Listed(by, expected));
    }

    pub(crate) async fn arrived_with(&mut self, devices: &[&str]) -> u64 {
        let id = self.arrived().await;
        self.listed(id, devices).await;
        id
    }

    /// Registers a plugin, and waits until it has arrived with its devices.
    async fn registered(&mut self, script: Script, devices: &[&str]) -> (Plugin, u64) {
        let plugin = self.plugin(script, devices);
        self.register(&plugin).await.unwrap();
        let id = self.arrived_with(devices).await;
        (plugin, id)
    }

    pub(crate) fn driver(&self, id: u64) -> Arc<dyn DeviceDriver> {
        self.endpoints.0.sink.drivers.lock()[id as usize - 1].clone()
    }

    async fn left(&mut self, by: u64) -> Problem {
        match self.report().await {
            Report::Left(id, why) if id == by => why,
            other => panic!("{other:?}"),
        }
    }

    /// Checks that there was no further report.
    fn is_quiet(&mut self) -> bool {
        self.reports.try_recv().is_err()
    }
}

fn location(dir: &tempfile::TempDir, endpoint: &str) -> Location {
    Location::beside(dir.path(), endpoint, "kubelet.sock").unwrap()
}

async fn allocate(driver: &Arc<dyn DeviceDriver>) -> Result<String, Problem> {
    let call = Call {
        request_id: "r-1".into(),
        deadline: PATIENCE,
    };
    let allocation = driver.allocate(&call, &["a".to_owned()]).await?;
    Ok(allocation.env["NATIVE_DEVICES"].clone())
}

#[tokio::test]
async fn plugin_lists_follow_in_order() {
    let mut bench = Bench::new();
    let (plugin, one) = bench.registered(Script::ok(), &["a", "b"]).await;
    let driver = bench.driver(one);
    plugin.list(vec![Device::healthy("c")]);
    bench.listed(one, &["c"]).await;
    assert_eq!(allocate(&driver).await.unwrap(), "a");
    assert!(bench.is_quiet());
}

#[tokio::test]
async fn second_registration_replaces_first_silently() {
    let mut bench = Bench::new();
    let (first, _) = bench.registered(Script::ok(), &["a", "b"]).await;
    // The same again, as a plugin does when it sees a new socket.
    bench.register(&first).await.unwrap();
    bench.arrived_with(&["a", "b"]).await;
    // Another process with another list. The previous one ends only then.
    let (second, three) = bench.registered(Script::ok(), &["c"]).await;
    first.die();
    second.list(vec![Device::healthy("d")]);
    bench.listed(three, &["d"]).await;
}

#[tokio::test]
async fn failed_registration_keeps_previous_plugin() {
    let mut bench = Bench::new();
    let (good, one) = bench.registered(Script::ok(), &["a"]).await;
    let nowhere = location(&bench.dir, "nowhere.sock");
    let refused = bench.endpoints.register(&resource(RESOURCE), nowhere).await;
    assert_eq!(refused.unwrap_err().kind, ProblemKind::NotFound);
    good.set_script(Script::ok().options(ScriptedOutcome::refuse("no GPU")));
    assert!(
        bench
            .register(&good)
            .await
            .unwrap_err()
            .message
            .contains("no GPU")
    );
    good.list(vec![Device::healthy("b")]);
    bench.listed(one, &["b"]).await;
}

#[tokio::test]
async fn call_fails_when_its_plugin_dies() {
    let mut bench = Bench::new();
    let (old, one) = bench
        .registered(Script::always(ScriptedOutcome::Hang), &["a"])
        .await;
    let driver = bench.driver(one);
    let (answer, ()) = tokio::join!(allocate(&driver), async {
        while !matches!(old.event().await, Event::Allocate { .. }) {}
        old.die();
    });
    assert_eq!(answer.unwrap_err().code, "driver-unavailable");
    assert_eq!(bench.left(one).await.kind, ProblemKind::Unavailable);
    let _new = bench.plugin(Script::ok(), &["b"]);
    let two = bench.arrived_with(&["b"]).await;
    let driver = bench.driver(two);
    assert_eq!(allocate(&driver).await.unwrap(), "a");
}

#[tokio::test]
async fn replaced_socket_spares_calls_in_flight() {
    let mut bench = Bench::new();
    let due = Arc::new(Notify::new());
    let answer = ScriptedOutcome::After(
        due.clone(),
        Box::new(ScriptedOutcome::ok(&["old".to_owned()])),
    );
    let (old, one) = bench.registered(Script::always(answer), &["a"]).await;
    let driver = bench.driver(one);
    let (answer, _new) = tokio::join!(allocate(&driver), async {
        while !matches!(old.event().await, Event::Allocate { .. }) {}
        let new = bench.plugin(Script::ok(), &["b"]);
        due.notify_one();
        new
    });
    assert_eq!(answer.unwrap(), "old");
    assert!(
        bench.is_quiet(),
        "the old plugin serves as long as it lives"
    );
    old.die();
    bench.left(one).await;
    bench.arrived_with(&["b"]).await;
}

#[tokio::test]
async fn later_registration_wins() {
    let mut bench = Bench::new();
    let mut options = Options::new(RESOURCE, bench.dir.path());
    options.endpoint = "slow.sock".to_owned();
    let slow = Plugin::unregistered(options, Script::ok().options(ScriptedOutcome::Hang)).unwrap();
    let quick = bench.plugin(Script::ok(), &["b"]);
    let (earlier, later) = tokio::join!(bench.register(&slow), async {
        assert_eq!(slow.event().await, Event::OptionsAsked);
        bench.register(&quick).await
    });
    assert_eq!(
        earlier.unwrap_err().code,
        ProblemCode::RegistrationSuperseded
    );
    later.unwrap();
    bench.arrived_with(&["b"]).await;
}

#[tokio::test]
async fn five_hundred_registrations_leave_one_plugin() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    let outcomes = futures::future::join_all((0..500).map(|_| bench.register(&plugin))).await;
    for outcome in &outcomes[..499] {
        assert!(
            outcome
                .as_ref()
                .is_err_and(|problem| problem.code == ProblemCode::RegistrationSuperseded),
            "{outcome:?}"
        );
    }
    outcomes[499].as_ref().unwrap();
    bench.arrived_with(&["a"]).await;
    assert!(bench.is_quiet());
    assert_eq!(bench.endpoints.0.slots().len(), 1);
}

#[tokio::test]
async fn resources_beyond_the_bound_are_refused() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    let names: Vec<_> = (0..500)
        .map(|index| resource(&format!("null.example.com/{index}")))
        .collect();
    let directory = bench.dir.path().to_owned();
    let here = || Location::beside(&directory, &plugin.options().endpoint, "kubelet.sock").unwrap();
    let all = names
        .iter()
        .map(|name| bench.endpoints.register(name, here()));
    let outcomes = futures::future::join_all(all).await;
    let refused: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| outcome.as_ref().err())
        .collect();
    assert_eq!(refused.len(), 500 - limit::PLUGIN_RESOURCES_MAX);
    assert!(
        refused
            .iter()
            .all(|problem| problem.message.contains("256 resources already"))
    );
    for _ in 0..limit::PLUGIN_RESOURCES_MAX * 2 {
        assert!(!matches!(bench.report().await, Report::Left(..)));
    }
    let accepted = bench.endpoints.accept(
        "/reg/a.sock",
        &resource("other.example.com/device"),
        "/a.sock".into(),
    );
    assert_eq!(accepted.unwrap_err().code, ProblemCode::TooManyResources);
    // A known resource may register again although the maximum of resources is reached.
    bench.endpoints.register(&names[0], here()).await.unwrap();
}

#[tokio::test]
async fn cancelled_call_ends_its_registration() {
    let bench = Bench::new();
    let plugin = bench.plugin(Script::ok().options(ScriptedOutcome::Hang), &[]);
    tokio::select! {
        outcome = bench.register(&plugin) => panic!("{outcome:?}"),
        event = plugin.event() => assert_eq!(event, Event::OptionsAsked),
    }
    bench.tasks.finished().await;
    assert!(bench.endpoints.0.slots().is_empty());
}

#[tokio::test]
async fn concurrent_registrations_are_limited() {
    let bench = Bench::new();
    let plugin = bench.plugin(Script::ok().options(ScriptedOutcome::Hang), &[]);
    for index in 0..REGISTRATIONS_AT_ONCE * 2 {
        let (endpoints, location) = (
            bench.endpoints.clone(),
            location(&bench.dir, &plugin.options().endpoint),
        );
        bench.tasks.spawn("registration", async move {
            let name = resource(&format!("null.example.com/{index}"));
            drop(endpoints.register(&name, location).await);
        });
    }
    for _ in 0..REGISTRATIONS_AT_ONCE {
        assert_eq!(plugin.event().await, Event::OptionsAsked);
    }
    assert_eq!(bench.endpoints.0.at_once.available_permits(), 0);
    assert_eq!(bench.endpoints.0.slots().len(), REGISTRATIONS_AT_ONCE * 2);
}

#[tokio::test]
async fn failing_stream_backs_off() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &[]);
    let began = Instant::now();
    bench.register(&plugin).await.unwrap();
    for round in 1..=6 {
        while plugin.event().await != Event::ListWatched {}
        plugin.fail_lists(Status::internal("driver unloaded"));
        assert_eq!(bench.arrived_with(&[]).await, round);
        let why = bench.left(round).await;
        assert!(
            why.message.contains(RESOURCE) && why.message.contains("driver unloaded"),
            "{why}"
        );
    }
    assert!(
        began.elapsed() >= RECONNECT_MIN * (1 + 2 + 4 + 8 + 16),
        "{:?}",
        began.elapsed()
    );
}

/// A list above the bound is the same list when it is read again.
#[tokio::test]
async fn unused_list_is_read_later() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &[]);
    let began = Instant::now();
    bench.register(&plugin).await.unwrap();
    for round in 1..=2 {
        while plugin.event().await != Event::ListWatched {}
        plugin.fail_lists(Status::out_of_range("decoded message length too large"));
        assert_eq!(bench.arrived_with(&[]).await, round);
        let why = bench.left(round).await;
        assert_eq!(why.code, "driver-answer-too-large");
    }
    assert!(
        began.elapsed() >= Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn plugin_without_socket_is_removed() {
    let mut bench = Bench::new();
    let (plugin, one) = bench.registered(Script::ok(), &["a"]).await;
    std::fs::remove_file(plugin.options().socket()).unwrap();
    let lost = Instant::now();
    plugin.die();
    bench.left(one).await;
    // From here on there is no IO but checks of the directory, so that the paused clock advances by itself.
    tokio::time::pause();
    bench.tasks.finished().await;
    assert!(
        lost.elapsed() >= limit::RESOURCE_GRACE,
        "{:?}",
        lost.elapsed()
    );
    assert!(bench.endpoints.0.slots().is_empty());
    assert!(bench.is_quiet());
}

fn unregister(plugin: &Plugin) {
    std::fs::remove_file(plugin.options().registration_socket().unwrap()).unwrap();
}

async fn until_registered(plugin: &Plugin) {
    while plugin.event().await != Event::Registered {}
}

#[tokio::test]
async fn registration_socket_adds_and_removes_plugin() {
    let mut bench = Bench::watching();
    let plugin = bench.start("one", "a").await;
    let one = bench.arrived_with(&["a"]).await;
    let driver = bench.driver(one);
    until_registered(&plugin).await;
    plugin.list(vec![Device::healthy("a"), Device::healthy("b")]);
    bench.listed(one, &["a", "b"]).await;
    unregister(&plugin);
    assert_eq!(bench.left(one).await.code, "driver-not-registered");
    assert_eq!(
        allocate(&driver).await.unwrap(),
        "a",
        "who has the driver may end its calls"
    );
}

#[tokio::test]
async fn older_socket_takes_over_from_newer() {
    let mut bench = Bench::watching();
    let _old = bench.start("old", "a").await;
    bench.arrived_with(&["a"]).await;
    let new = bench.start("new", "b").await;
    let two = bench.arrived_with(&["b"]).await;
    until_registered(&new).await;
    unregister(&new);
    bench.left(two).await;
    bench.arrived_with(&["a"]).await;
}

#[tokio::test]
async fn removing_older_socket_is_silent() {
    let mut bench = Bench::watching();
    let old = bench.start("old", "a").await;
    bench.arrived_with(&["a"]).await;
    let new = bench.start("new", "b").await;
    let two = bench.arrived_with(&["b"]).await;
    until_registered(&old).await;
    unregister(&old);
    // Reports of this one follow all effects of the older one's end.
    let other = bench
        .start_as("other.example.com/device", "other", "c")
        .await;
    bench.arrived_with(&["c"]).await;
    until_registered(&other).await;
    new.list(vec![Device::healthy("d")]);
    bench.listed(two, &["d"]).await;
}

#[tokio::test]
async fn plugin_serving_late_is_connected() {
    let mut bench = Bench::watching();
    let directory = bench.dir.path().join("late");
    std::fs::create_dir(&directory).unwrap();
    let mut options = Options::new(RESOURCE, &directory);
    options.register = Register::PluginsRegistry(bench.dir.path().join("reg").join("late"));
    let dead = options.socket();
    let plugin = Plugin::unregistered(options, Script::ok()).unwrap();
    plugin.disconnect();
    std::fs::remove_file(&dead).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    plugin.register().await.unwrap();
    until_registered(&plugin).await;
    plugin.list(vec![Device::healthy("a")]);
    // A call that came later and failed does not end the attempts.
    let nowhere = location(&bench.dir, "nowhere.sock");
    bench
        .endpoints
        .register(&resource(RESOURCE), nowhere)
        .await
        .unwrap_err();
    plugin.serve().unwrap();
    bench.arrived_with(&["a"]).await;
}

#[tokio::test]
async fn call_registration_survives_other_sockets_removal() {
    let mut bench = Bench::watching();
    let first = bench.start("one", "a").await;
    bench.arrived_with(&["a"]).await;
    until_registered(&first).await;
    let (_second, _) = bench.registered(Script::ok(), &["b"]).await;
    unregister(&first);
    // It is detected before this one, which is registered after it.
    let third = bench.start("third", "c").await;
    bench.arrived_with(&["c"]).await;
    until_registered(&third).await;
}
