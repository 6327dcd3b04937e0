//! Claims of native plugins: the same manager, the same registry, other people's programs.

use std::path::Path;

use native_null::{Answer, Device, Event, Operation, Options, Plugin, Script};
use tokio::sync::mpsc;

use super::super::ClaimEnd;
use super::super::fixtures::{claim, driver, pod};
use super::daemon::{Daemon, FakeDriver, Home, cdi_devices, ends};
use crate::base::tasks::Tasks;
use crate::discovery::sockets;
use crate::model::ClaimState;
use crate::registry::device_plugins::DevicePlugins;
use crate::registry::plugins::{PluginTimes, Plugins};

/// A folder of sockets that outlives daemons.
struct Sockets(tempfile::TempDir);

impl Sockets {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("reg")).unwrap();
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Lets a daemon take the plugins; until the tasks stop.
    fn watched_by(&self, daemon: &Daemon) -> Tasks {
        let (tasks, (sender, events)) = (Tasks::new(), mpsc::channel(16));
        let (registry, device_plugins) = (daemon.registry.clone(), DevicePlugins::default());
        let plugins =
            Plugins { registry, device_plugins, times: PluginTimes::default(), tasks: tasks.clone() };
        tasks.spawn("plugins", plugins.run(events));
        tasks.spawn("sockets", sockets::watch(self.path().join("reg"), tasks.clone(), sender));
        tasks
    }

    /// Starts an instance and waits until the daemon calls it.
    async fn plugin(&self, daemon: &Daemon, instance: &str, script: Script) -> Plugin {
        let options = Options::new("gpu.example.com", &self.path().join("reg"), &self.path().join("plugins"));
        let plugin = Plugin::start(options.instance(instance), script).await.unwrap();
        assert_eq!(plugin.notified().await, (true, String::new()));
        served(daemon, &plugin).await;
        plugin
    }
}

async fn served(daemon: &Daemon, plugin: &Plugin) {
    let source = plugin.registration_socket().display().to_string();
    let mut changes = daemon.registry.serving_changes();
    while daemon.registry.serving(&driver("gpu")).map_or(true, |driver| driver.identity.source != source) {
        changes.changed().await.unwrap();
    }
}

/// One device, under a CDI name of the instance.
fn prepares(instance: &'static str) -> Script {
    Script::new(move |_, claim| {
        let cdi_names = vec![format!("gpu.example.com/{instance}={}", claim.uid)];
        let (pool, device) = ("pool".into(), "0".into());
        Answer::Devices(vec![Device { pool, device, cdi_names, ..Device::default() }])
    })
}

async fn called(plugin: &Plugin) -> Operation {
    loop {
        if let Event::Called { operation, .. } = plugin.event().await {
            return operation;
        }
    }
}

#[tokio::test]
async fn a_claim_of_a_native_plugin_and_a_sandboxed_driver_is_one_claim() {
    let (home, sockets, a, nic) = (Home::new(), Sockets::new(), pod("a"), FakeDriver::new(driver("nic")));
    let daemon = home.start();
    let _watching = sockets.watched_by(&daemon);
    let plugin = sockets.plugin(&daemon, "one", prepares("one")).await;
    daemon.serve(&nic);
    daemon.source.put(claim("both", &["gpu/0", "nic/0"], &[&a]));
    let outcome = daemon.prepare(&a, &["both"]).await;
    assert_eq!(ends(&outcome), ["prepared"]);
    assert!(cdi_devices(&outcome).contains(&"gpu.example.com/one=uid-both".to_owned()), "{outcome:?}");
    assert_eq!((daemon.cdi_files().len(), nic.counts()), (1, (1, 0)), "the plugin writes its own files");
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!(called(&plugin).await, Operation::Prepare);
    assert_eq!(called(&plugin).await, Operation::Unprepare);
}

#[tokio::test]
async fn a_plugin_that_dies_between_intent_and_answer_is_asked_again_when_it_is_back() {
    let (home, sockets, a) = (Home::new(), Sockets::new(), pod("a"));
    let daemon = home.start();
    let _watching = sockets.watched_by(&daemon);
    let plugin = sockets.plugin(&daemon, "one", Script::prepare(Answer::Die)).await;
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    let refused = daemon.prepare(&a, &["one"]).await;
    assert!(refused.claims[0].end.is_err() && refused.containers.is_empty());
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Preparing), "the intent stands");
    drop(plugin);
    let _plugin = sockets.plugin(&daemon, "one", prepares("again")).await;
    let outcome = daemon.prepare(&a, &["one"]).await;
    assert_eq!(cdi_devices(&outcome), ["gpu.example.com/again=uid-one"], "{outcome:?}");
}

#[tokio::test]
async fn what_one_instance_prepared_another_gives_back_after_a_restart_of_ours() {
    let (home, sockets, a) = (Home::new(), Sockets::new(), pod("a"));
    let daemon = home.start();
    let watching = sockets.watched_by(&daemon);
    let old = sockets.plugin(&daemon, "old", prepares("old")).await;
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    let first = daemon.prepare(&a, &["one"]).await;
    watching.stop();
    daemon.stop().await;
    old.unregister().unwrap();
    drop(old);

    let daemon = home.start();
    let _watching = sockets.watched_by(&daemon);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    assert_eq!(daemon.prepare(&a, &["one"]).await.containers, first.containers, "without any plugin");
    assert!(daemon.unprepare(&a).await[0].is_err(), "kept until its driver is back");
    daemon.tend();
    let new = sockets.plugin(&daemon, "new", prepares("new")).await;
    daemon.gone("uid-one").await;
    assert_eq!(called(&new).await, Operation::Unprepare);
}
