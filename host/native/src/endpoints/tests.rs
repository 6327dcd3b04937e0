//! Tests with scripted plugins that register, break and return.

use std::time::Duration;

use native_device_plugin::{Answer, Device, Event, Options, Plugin, Register, Script};
use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::Status;

use super::*;
use crate::device_plugins::DevicePlugins;
use crate::plugins::{PluginTimes, Plugins};
use crate::sockets;
use nodedock_base::changes::Changes;
use nodedock_core::driver::Call;
use nodedock_core::registry::Registry;
use nodedock_model::ProblemKind;

pub(crate) const RESOURCE: &str = "null.example.com/device";
/// Longer than any step takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn resource(name: &str) -> ExtendedResource {
    ExtendedResource::new(name).unwrap()
}

/// A report to a sink, with the number of the plugin.
pub(crate) enum Report {
    Arrived(u64, Arc<dyn DeviceDriver>),
    Listed(u64, Vec<String>),
    Left(u64, Problem),
}

/// Records the reports.
#[derive(Clone)]
pub(crate) struct Sink {
    reports: mpsc::UnboundedSender<Report>,
    last: Arc<Mutex<u64>>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl PluginSink for Sink {
    type Id = u64;

    fn plugin_called(&self, resource: &ExtendedResource) {
        self.calls.lock().unwrap().push(resource.to_string());
    }

    fn plugin_arrived(&self, _: ExtendedResource, _: PathBuf, driver: Arc<dyn DeviceDriver>) -> u64 {
        let mut last = self.last.lock().unwrap();
        *last += 1;
        let _ = self.reports.send(Report::Arrived(*last, driver));
        *last
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
        let (sink, tasks) =
            (Sink { reports: sender, last: Arc::default(), calls: Arc::default() }, Tasks::new());
        let endpoints = Endpoints::new(sink, PluginSteps::default(), tasks.clone());
        Self { dir: tempfile::tempdir().unwrap(), endpoints, tasks, reports }
    }

    pub(crate) fn plugin(&self, script: Script, devices: &[&str]) -> Plugin {
        let plugin = Plugin::unregistered(Options::new(RESOURCE, self.dir.path()), script).unwrap();
        plugin.list(devices.iter().map(|id| Device::healthy(id)).collect());
        plugin
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), Problem> {
        let location = place(&self.dir, &plugin.options().endpoint);
        self.endpoints.register(&resource(RESOURCE), location, Origin::KubeletSocket).await
    }

    /// Returns the resources whose plugins called to register.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.endpoints.0.sink.calls.lock().unwrap().clone()
    }

    pub(crate) async fn report(&mut self) -> Report {
        tokio::time::timeout(PATIENCE, self.reports.recv()).await.expect("no report arrives").unwrap()
    }

    pub(crate) async fn arrived(&mut self) -> (u64, Arc<dyn DeviceDriver>) {
        match self.report().await {
            Report::Arrived(id, driver) => (id, driver),
            Report::Listed(id, devices) => panic!("{id} listed {devices:?}"),
            Report::Left(id, why) => panic!("{id} left: {why}"),
        }
    }

    pub(crate) async fn listed(&mut self, by: u64, expected: &[&str]) {
        match self.report().await {
            Report::Listed(id, devices) => {
                assert_eq!((id, devices), (by, expected.iter().map(|id| (*id).to_owned()).collect()))
            }
            Report::Arrived(id, _) => panic!("{id} arrived"),
            Report::Left(id, why) => panic!("{id} left: {why}"),
        }
    }

    async fn left(&mut self, by: u64) -> Problem {
        match self.report().await {
            Report::Left(id, why) if id == by => why,
            Report::Left(id, why) => panic!("{id} left: {why}"),
            Report::Arrived(id, _) => panic!("{id} arrived"),
            Report::Listed(id, devices) => panic!("{id} listed {devices:?}"),
        }
    }

    /// Checks that there was no further report.
    fn is_quiet(&mut self) -> bool {
        self.reports.try_recv().is_err()
    }
}

fn place(dir: &tempfile::TempDir, endpoint: &str) -> Location {
    Location::beside(dir.path(), endpoint, "kubelet.sock").unwrap()
}

async fn allocate(driver: &Arc<dyn DeviceDriver>) -> Result<String, Problem> {
    let call = Call { request_id: "r-1".into(), deadline: PATIENCE };
    let allocation = driver.allocate(&call, &["a".to_owned()]).await?;
    Ok(allocation.env["NATIVE_DEVICES"].clone())
}

#[tokio::test]
async fn a_plugin_arrives_and_its_lists_follow_each_the_one_before() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a", "b"]);
    bench.register(&plugin).await.unwrap();
    let (one, driver) = bench.arrived().await;
    bench.listed(one, &["a", "b"]).await;
    plugin.list(vec![Device::healthy("c")]);
    bench.listed(one, &["c"]).await;
    assert_eq!(allocate(&driver).await.unwrap(), "a");
    assert!(bench.is_quiet());
}

#[tokio::test]
async fn a_plugin_that_registers_again_replaces_itself_without_a_report_of_its_former_self() {
    let mut bench = Bench::new();
    let first = bench.plugin(Script::ok(), &["a", "b"]);
    bench.register(&first).await.unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["a", "b"]).await;
    // The same again, as a plugin does when it sees a new socket.
    bench.register(&first).await.unwrap();
    let (two, _) = bench.arrived().await;
    bench.listed(two, &["a", "b"]).await;
    // Another process with another list. The previous one ends only then.
    let second = bench.plugin(Script::ok(), &["c"]);
    bench.register(&second).await.unwrap();
    let (three, _) = bench.arrived().await;
    bench.listed(three, &["c"]).await;
    first.die();
    second.list(vec![Device::healthy("d")]);
    bench.listed(three, &["d"]).await;
}

#[tokio::test]
async fn a_registration_that_fails_leaves_the_one_before_as_it_is() {
    let mut bench = Bench::new();
    let good = bench.plugin(Script::ok(), &["a"]);
    bench.register(&good).await.unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    let nowhere = place(&bench.dir, "nowhere.sock");
    let refused = bench.endpoints.register(&resource(RESOURCE), nowhere, Origin::KubeletSocket).await;
    assert_eq!(refused.unwrap_err().kind, ProblemKind::NotFound);
    good.set_script(Script::ok().options(Answer::refuse("no GPU")));
    assert!(bench.register(&good).await.unwrap_err().message.contains("no GPU"));
    good.list(vec![Device::healthy("b")]);
    bench.listed(one, &["b"]).await;
}

#[tokio::test]
async fn a_broken_stream_is_reported_with_its_reason_and_opened_again() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    bench.register(&plugin).await.unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    plugin.fail_lists(Status::internal("driver unloaded"));
    let why = bench.left(one).await;
    assert!(why.message.contains(RESOURCE) && why.message.contains("driver unloaded"), "{why}");
    let (two, _) = bench.arrived().await;
    bench.listed(two, &["a"]).await;
}

#[tokio::test]
async fn a_plugin_that_restarts_without_registering_is_found_again() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    bench.register(&plugin).await.unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    let socket = plugin.options().socket();
    plugin.die();
    assert_eq!(bench.left(one).await.kind, ProblemKind::Unavailable);
    std::fs::remove_file(socket).unwrap();
    let _again = bench.plugin(Script::ok(), &["b"]);
    let (two, _) = bench.arrived().await;
    bench.listed(two, &["b"]).await;
}

#[tokio::test]
async fn a_call_in_flight_ends_with_its_plugin_and_the_next_goes_to_the_one_in_its_place() {
    let mut bench = Bench::new();
    let old = bench.plugin(Script::always(Answer::Hang), &["a"]);
    bench.register(&old).await.unwrap();
    let (one, driver) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    let (answer, ()) = tokio::join!(allocate(&driver), async {
        while !matches!(old.event().await, Event::Allocate { .. }) {}
        old.die();
    });
    assert_eq!(answer.unwrap_err().code, "driver-unavailable");
    bench.left(one).await;
    let _new = bench.plugin(Script::ok(), &["b"]);
    let (two, driver) = bench.arrived().await;
    bench.listed(two, &["b"]).await;
    assert_eq!(allocate(&driver).await.unwrap(), "a");
}

#[tokio::test]
async fn a_socket_that_is_replaced_does_not_harm_a_call_in_flight_and_is_taken_when_the_old_one_ends() {
    let mut bench = Bench::new();
    let due = Arc::new(Notify::new());
    let answer = Answer::After(due.clone(), Box::new(Answer::ok(&["old".to_owned()])));
    let old = bench.plugin(Script::always(answer), &["a"]);
    bench.register(&old).await.unwrap();
    let (one, driver) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    let (answer, _new) = tokio::join!(allocate(&driver), async {
        while !matches!(old.event().await, Event::Allocate { .. }) {}
        let new = bench.plugin(Script::ok(), &["b"]);
        due.notify_one();
        new
    });
    assert_eq!(answer.unwrap(), "old");
    assert!(bench.is_quiet(), "the old plugin serves as long as it lives");
    old.die();
    bench.left(one).await;
    let (two, _) = bench.arrived().await;
    bench.listed(two, &["b"]).await;
}

#[tokio::test]
async fn of_two_registrations_at_once_the_later_counts() {
    let mut bench = Bench::new();
    let mut options = Options::new(RESOURCE, bench.dir.path());
    options.endpoint = "slow.sock".to_owned();
    let slow = Plugin::unregistered(options, Script::ok().options(Answer::Hang)).unwrap();
    let quick = bench.plugin(Script::ok(), &["b"]);
    let (earlier, later) = tokio::join!(bench.register(&slow), async {
        assert_eq!(slow.event().await, Event::OptionsAsked);
        bench.register(&quick).await
    });
    assert_eq!(earlier.unwrap_err().code, SUPERSEDED);
    later.unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["b"]).await;
}

#[tokio::test]
async fn five_hundred_registrations_of_a_resource_leave_one_plugin() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    let outcomes = futures::future::join_all((0..500).map(|_| bench.register(&plugin))).await;
    for outcome in &outcomes[..499] {
        assert!(outcome.as_ref().is_err_and(|problem| problem.code == SUPERSEDED), "{outcome:?}");
    }
    outcomes[499].as_ref().unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    assert!(bench.is_quiet());
    assert_eq!(bench.endpoints.0.slots().len(), 1);
}

#[tokio::test]
async fn five_hundred_resources_are_accepted_up_to_the_bound_and_the_others_are_refused() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    let names: Vec<_> = (0..500).map(|index| resource(&format!("null.example.com/{index}"))).collect();
    let directory = bench.dir.path().to_owned();
    let here = || Location::beside(&directory, &plugin.options().endpoint, "kubelet.sock").unwrap();
    let all = names.iter().map(|name| bench.endpoints.register(name, here(), Origin::KubeletSocket));
    let outcomes = futures::future::join_all(all).await;
    let refused: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(refused.len(), 500 - limit::PLUGIN_RESOURCES_MAX);
    assert!(refused.iter().all(|problem| problem.message.contains("256 resources already")));
    for _ in 0..limit::PLUGIN_RESOURCES_MAX * 2 {
        assert!(!matches!(bench.report().await, Report::Left(..)));
    }
    // A known resource may register again although the maximum of resources is reached.
    bench.endpoints.register(&names[0], here(), Origin::KubeletSocket).await.unwrap();
}

#[tokio::test]
async fn plugins_that_do_not_answer_are_asked_a_few_at_a_time() {
    let bench = Bench::new();
    let plugin = bench.plugin(Script::ok().options(Answer::Hang), &[]);
    for index in 0..limit::REGISTRATIONS_AT_ONCE * 2 {
        let (endpoints, location) = (bench.endpoints.clone(), place(&bench.dir, &plugin.options().endpoint));
        bench.tasks.spawn("registration", async move {
            let name = resource(&format!("null.example.com/{index}"));
            drop(endpoints.register(&name, location, Origin::KubeletSocket).await);
        });
    }
    for _ in 0..limit::REGISTRATIONS_AT_ONCE {
        assert_eq!(plugin.event().await, Event::OptionsAsked);
    }
    assert_eq!(bench.endpoints.0.at_once.available_permits(), 0);
    assert_eq!(bench.endpoints.0.slots().len(), limit::REGISTRATIONS_AT_ONCE * 2);
}

#[tokio::test]
async fn a_plugin_whose_stream_ends_at_once_is_tried_ever_more_seldom() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &[]);
    let began = Instant::now();
    bench.register(&plugin).await.unwrap();
    for round in 1..=6 {
        while plugin.event().await != Event::ListWatched {}
        plugin.fail_lists(Status::internal("driver unloaded"));
        let (id, _) = bench.arrived().await;
        bench.listed(id, &[]).await;
        assert_eq!(id, round);
        assert!(bench.left(id).await.message.contains("driver unloaded"));
    }
    assert!(began.elapsed() >= limit::RECONNECT_MIN * (1 + 2 + 4 + 8 + 16), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_plugin_whose_socket_is_gone_for_the_grace_period_is_removed() {
    let mut bench = Bench::new();
    let plugin = bench.plugin(Script::ok(), &["a"]);
    bench.register(&plugin).await.unwrap();
    let (one, _) = bench.arrived().await;
    bench.listed(one, &["a"]).await;
    std::fs::remove_file(plugin.options().socket()).unwrap();
    let lost = Instant::now();
    plugin.die();
    bench.left(one).await;
    // From here on there is no IO but checks of the directory, so that the paused clock advances by itself.
    tokio::time::pause();
    bench.tasks.finished().await;
    assert!(lost.elapsed() >= limit::RESOURCE_GRACE, "{:?}", lost.elapsed());
    assert!(bench.endpoints.0.slots().is_empty());
    assert!(bench.is_quiet());
}

/// Native plugins of a directory, from the registration socket to the endpoints.
struct Dock {
    bench: Bench,
    registered: PathBuf,
}

impl Dock {
    fn new() -> Self {
        let bench = Bench::new();
        let registered = bench.dir.path().join("reg");
        std::fs::create_dir(&registered).unwrap();
        let device_plugins = DevicePlugins::default();
        let (registry, tasks) = (Registry::new(Changes::default()), bench.tasks.clone());
        let times = PluginTimes::default();
        let plugins =
            Plugins { registry, device_plugins: device_plugins.clone(), times, tasks: tasks.clone() };
        let (sender, events) = mpsc::channel(64);
        tasks.spawn("plugins", plugins.run(events));
        tasks.spawn("sockets", sockets::watch(registered.clone(), tasks.clone(), sender));
        tasks.spawn("endpoints", bench.endpoints.clone().follow(device_plugins));
        Self { bench, registered }
    }

    async fn start(&self, name: &str, device: &str) -> Plugin {
        self.start_as(RESOURCE, name, device).await
    }

    async fn start_as(&self, resource: &str, name: &str, device: &str) -> Plugin {
        let directory = self.bench.dir.path().join(name);
        let mut options = Options::new(resource, &directory);
        options.register = Register::PluginsRegistry(self.registered.join(name));
        Plugin::start(options, Script::ok(), vec![Device::healthy(device)]).await.unwrap()
    }
}

fn unregister(plugin: &Plugin) {
    std::fs::remove_file(plugin.options().registration_socket().unwrap()).unwrap();
}

async fn until_registered(plugin: &Plugin) {
    while plugin.event().await != Event::Registered {}
}

#[tokio::test]
async fn a_registration_socket_brings_a_plugin_and_takes_it_away() {
    let mut dock = Dock::new();
    let plugin = dock.start("one", "a").await;
    let (one, driver) = dock.bench.arrived().await;
    dock.bench.listed(one, &["a"]).await;
    until_registered(&plugin).await;
    plugin.list(vec![Device::healthy("a"), Device::healthy("b")]);
    dock.bench.listed(one, &["a", "b"]).await;
    unregister(&plugin);
    assert_eq!(dock.bench.left(one).await.code, "driver-not-registered");
    assert_eq!(allocate(&driver).await.unwrap(), "a", "who has the driver may end its calls");
}

#[tokio::test]
async fn of_two_registration_sockets_the_newer_serves_and_the_older_falls_in_for_it() {
    let mut dock = Dock::new();
    let _old = dock.start("old", "a").await;
    let (one, _) = dock.bench.arrived().await;
    dock.bench.listed(one, &["a"]).await;
    let new = dock.start("new", "b").await;
    let (two, _) = dock.bench.arrived().await;
    dock.bench.listed(two, &["b"]).await;
    until_registered(&new).await;
    unregister(&new);
    dock.bench.left(two).await;
    let (three, _) = dock.bench.arrived().await;
    dock.bench.listed(three, &["a"]).await;
}

#[tokio::test]
async fn of_two_registration_sockets_the_older_goes_without_a_word() {
    let mut dock = Dock::new();
    let old = dock.start("old", "a").await;
    let (one, _) = dock.bench.arrived().await;
    dock.bench.listed(one, &["a"]).await;
    let new = dock.start("new", "b").await;
    let (two, _) = dock.bench.arrived().await;
    dock.bench.listed(two, &["b"]).await;
    until_registered(&old).await;
    unregister(&old);
    // Reports of this one follow all effects of the older one's end.
    let other = dock.start_as("other.example.com/device", "other", "c").await;
    let (three, _) = dock.bench.arrived().await;
    dock.bench.listed(three, &["c"]).await;
    until_registered(&other).await;
    new.list(vec![Device::healthy("d")]);
    dock.bench.listed(two, &["d"]).await;
}

#[tokio::test]
async fn a_plugin_that_is_accepted_before_it_serves_is_taken_up_when_it_does() {
    let mut dock = Dock::new();
    let directory = dock.bench.dir.path().join("late");
    std::fs::create_dir(&directory).unwrap();
    let mut options = Options::new(RESOURCE, &directory);
    options.register = Register::PluginsRegistry(dock.registered.join("late"));
    let dead = options.socket();
    let plugin = Plugin::unregistered(options, Script::ok()).unwrap();
    plugin.disconnect();
    std::fs::remove_file(&dead).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    plugin.register().await.unwrap();
    until_registered(&plugin).await;
    plugin.list(vec![Device::healthy("a")]);
    plugin.serve().unwrap();
    let (one, _) = dock.bench.arrived().await;
    dock.bench.listed(one, &["a"]).await;
}

#[tokio::test]
async fn a_plugin_that_registers_by_call_is_not_removed_with_the_registration_socket_of_another() {
    let mut dock = Dock::new();
    let first = dock.start("one", "a").await;
    let (one, _) = dock.bench.arrived().await;
    dock.bench.listed(one, &["a"]).await;
    until_registered(&first).await;
    let second = dock.bench.plugin(Script::ok(), &["b"]);
    dock.bench.register(&second).await.unwrap();
    let (two, _) = dock.bench.arrived().await;
    dock.bench.listed(two, &["b"]).await;
    unregister(&first);
    // It is detected before this one, which is registered after it.
    let third = dock.start("third", "c").await;
    let (three, _) = dock.bench.arrived().await;
    dock.bench.listed(three, &["c"]).await;
    until_registered(&third).await;
}
