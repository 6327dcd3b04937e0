//! Plugins behind real sockets, from their registration to a pod's devices.

use native_device_plugin::{Answer, Device, Event, Options, Plugin, Script};

use super::super::endpoints::Endpoints;
use super::super::fixtures::resource;
use super::super::registration;
use super::daemon::{Daemon, Home, app, ends};
use crate::driver::grpc::PluginSteps;

struct Node {
    daemon: Daemon,
    folder: tempfile::TempDir,
    _home: Home,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.daemon.tasks.stop();
    }
}

impl Node {
    /// A manager whose plugins call a socket of their own.
    async fn new() -> Self {
        let home = Home::new();
        let (daemon, folder) = (home.start(), tempfile::tempdir().unwrap());
        let endpoints = Endpoints::new(daemon.devices.clone(), PluginSteps::default(), daemon.tasks.clone());
        let listener = registration::listen(folder.path()).await.unwrap();
        let serving =
            registration::serve(listener, folder.path().to_owned(), endpoints, daemon.tasks.clone());
        daemon.tasks.spawn("registration", serving);
        Self { daemon, folder, _home: home }
    }

    fn options(&self) -> Options {
        Options::new(resource("gpu").as_str(), self.folder.path())
    }

    async fn plugin(&self, script: Script, devices: Vec<Device>) -> Plugin {
        let plugin = Plugin::start(self.options(), script, devices).await.unwrap();
        assert_eq!(plugin.event().await, Event::OptionsAsked);
        plugin
    }

    async fn until_counts(&self, wanted: (usize, usize)) {
        self.daemon.until(|daemon| daemon.counts("gpu") == Some(wanted)).await;
    }
}

#[tokio::test]
async fn a_plugin_that_registers_lists_and_is_asked_for_a_pods_devices() {
    let node = Node::new().await;
    let listed = vec![Device::healthy("a").on(&[1]), Device::unhealthy("b"), Device::healthy("a")];
    let plugin = node.plugin(Script::ok(), listed).await;
    node.until_counts((2, 1)).await;
    assert_eq!(node.daemon.conditions(), ["device-list-faulty"], "a device is listed twice");
    let given = node.daemon.allocate("a", &app(&[("gpu", 1)])).await;
    assert!(given[0].end.as_ref().unwrap().contains_key("a"), "{given:?}");
    let record = node.daemon.devices.allocation("uid-a").unwrap();
    let response = record.entry("main", &resource("gpu")).unwrap().response.clone().unwrap();
    assert_eq!(response.env["NATIVE_DEVICES"], "a");
    plugin.list(vec![Device::healthy("c")]);
    node.until_counts((1, 1)).await;
}

#[tokio::test]
async fn what_a_plugin_answers_badly_is_refused_in_its_own_words_and_the_device_stays_free() {
    let node = Node::new().await;
    let plugin = node.plugin(Script::always(Answer::bad_path()), vec![Device::healthy("a")]).await;
    node.until_counts((1, 1)).await;
    let refused = node.daemon.allocate("a", &app(&[("gpu", 1)])).await;
    let why = refused[0].end.as_ref().unwrap_err();
    assert!(why.message.contains("container_path \"/x/../../etc\""), "{why}");
    plugin.set_script(Script::always(Answer::NoResponse));
    assert_eq!(ends(&node.daemon.allocate("b", &app(&[("gpu", 1)])).await), ["driver-answer-not-valid"]);
}

#[tokio::test]
async fn a_plugin_that_crashed_has_no_healthy_device_until_it_is_back_without_registering() {
    let node = Node::new().await;
    let plugin = node.plugin(Script::ok(), vec![Device::healthy("a")]).await;
    node.until_counts((1, 1)).await;
    plugin.die();
    node.until_counts((1, 0)).await;
    assert_eq!(ends(&node.daemon.allocate("a", &app(&[("gpu", 1)])).await), ["no-healthy-device"]);
    let again = Plugin::unregistered(node.options(), Script::ok()).unwrap();
    again.list(vec![Device::healthy("a"), Device::healthy("b")]);
    node.until_counts((2, 2)).await;
}
