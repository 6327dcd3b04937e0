//! A device plugin from its registration to the end of the pods that have its devices, by both ways of registration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use native_device_plugin::{
    Choice, Device, Event, Options as PluginOptions, Plugin, Script, ScriptedOutcome, api,
};
use nodedock_proto::node::v1;
use nodedock_tests::Daemon;
use nodedock_tests::compose::pod;
use tonic::Code;

use super::agreement::agree;
use super::{
    NIC, calling, container, freed, ids, limited, nics, ready, request_of, short, start, started,
    until_allocate, until_event, with_nics, with_registration_socket,
};

/// Everything that an answer can have; the paths are on any machine.
fn full(library: &Path, devices: &[String]) -> ScriptedOutcome {
    let node = |id: &String| api::DeviceSpec {
        container_path: format!("/dev/{id}"),
        host_path: "/dev/null".to_owned(),
        permissions: "rw".to_owned(),
    };
    ScriptedOutcome::container(api::ContainerAllocateResponse {
        envs: BTreeMap::from([("NICS".to_owned(), devices.join(","))]),
        mounts: vec![api::Mount {
            container_path: "/usr/lib/nic".to_owned(),
            host_path: library.display().to_string(),
            read_only: true,
        }],
        devices: devices.iter().map(node).collect(),
        annotations: BTreeMap::from([("example.com/nics".to_owned(), devices.join("_"))]),
        cdi_devices: devices
            .iter()
            .map(|id| api::CdiDevice {
                name: format!("{NIC}={id}"),
            })
            .collect(),
    })
}

/// Returns the settings that a runtime has to receive for a container with these devices.
fn expected(library: &Path, name: &str, devices: &[String]) -> v1::ContainerDevices {
    let node = |id: &String| v1::DeviceNode {
        host_path: "/dev/null".to_owned(),
        container_path: format!("/dev/{id}"),
        permissions: "rw".to_owned(),
    };
    v1::ContainerDevices {
        name: name.to_owned(),
        cdi_devices: devices.iter().map(|id| format!("{NIC}={id}")).collect(),
        env: [("NICS".to_owned(), devices.join(","))].into(),
        mounts: vec![v1::Mount {
            host_path: library.display().to_string(),
            container_path: "/usr/lib/nic".to_owned(),
            read_only: true,
        }],
        device_nodes: devices.iter().map(node).collect(),
        annotations: [("example.com/nics".to_owned(), devices.join("_"))].into(),
        conflicts: Vec::new(),
    }
}

/// Those that must be there, and of the others the last.
fn last(choice: &Choice) -> Vec<String> {
    let others = choice
        .available
        .iter()
        .rev()
        .filter(|id| !choice.must_include.contains(id));
    choice
        .must_include
        .iter()
        .chain(others)
        .take(usize::try_from(choice.size).unwrap())
        .cloned()
        .collect()
}

const KINDS: [(&str, &str, u32); 4] = [
    ("init", "init", 2),
    ("sidecar", "sidecar", 1),
    ("main", "", 2),
    ("second", "app", 1),
];

/// A pod with every kind of container, a plugin with an opinion, and all of it again after crashes.
struct Life {
    daemon: Daemon,
    options: PluginOptions,
    plugin: Option<Plugin>,
    request: v1::PreparePodRequest,
    answer: v1::PreparePodResponse,
}

impl Life {
    async fn begin(options: impl Fn(&Daemon) -> PluginOptions) -> Self {
        let daemon = Daemon::start().await;
        let options = PluginOptions {
            pre_start: true,
            ..options(&daemon)
        };
        let containers = KINDS.map(|(name, kind, count)| container(name, kind, &[(NIC, count)]));
        let request = request_of("one", containers.to_vec());
        let mut life = Self {
            daemon,
            options,
            plugin: None,
            request,
            answer: Default::default(),
        };
        life.bring_plugin().await;
        life.answer = ready(&life.daemon, life.request.clone()).await;
        life
    }

    async fn bring_plugin(&mut self) {
        let library = self.daemon.path().to_owned();
        let script = Script::new(move |ids| full(&library, ids)).choose(last);
        let devices = [nics(5), vec![Device::unhealthy("nic-5")]].concat();
        self.plugin = Some(started(&self.daemon, self.options.clone(), script, devices).await);
    }

    fn plugin(&self) -> &Plugin {
        self.plugin.as_ref().expect("it is here")
    }

    fn ids(&self, container: &str) -> Vec<String> {
        ids(&self.answer, container, NIC)
    }

    /// Init containers' devices are used again, a sidecar keeps its own.
    fn devices_are_right(&self) {
        assert_eq!(
            self.ids("init"),
            ["nic-3", "nic-4"],
            "the plugin's preference"
        );
        let [init, sidecar, main, second] =
            KINDS.map(|(name, ..)| BTreeSet::from_iter(self.ids(name)));
        assert!(
            sidecar.is_subset(&init) && !main.is_disjoint(&init),
            "{:#?}",
            self.answer
        );
        let together: BTreeSet<_> = [&sidecar, &main, &second].into_iter().flatten().collect();
        assert_eq!(
            together.len(),
            4,
            "no pod shares a device with another that runs: {:#?}",
            self.answer
        );
        let containers = KINDS
            .map(|(name, ..)| expected(self.daemon.path(), name, &ids(&self.answer, name, NIC)));
        assert_eq!(self.answer.containers, containers);
    }

    /// One question and one Allocate for each container, in their order; all bear the request's id and a deadline.
    async fn plugin_was_asked(&self) {
        let choice = until_event(self.plugin(), |event| matches!(event, Event::Preferred(_))).await;
        let Event::Preferred(choice) = choice else {
            panic!("{choice:?}")
        };
        assert_eq!((choice.size, choice.must_include.len()), (2, 0));
        assert_eq!(
            choice.available,
            ["nic-0", "nic-1", "nic-2", "nic-3", "nic-4"],
            "the healthy ones"
        );
        for (name, ..) in KINDS {
            let asked = until_event(self.plugin(), |event| {
                matches!(event, Event::Allocate { .. })
            })
            .await;
            let Event::Allocate {
                devices,
                request_id,
                deadline,
            } = asked
            else {
                panic!("{asked:?}")
            };
            assert_eq!(devices, self.ids(name), "{name}");
            assert!(request_id.is_some() && deadline.is_some(), "{name}");
        }
    }

    /// The same to a repeated request and to a reader, and all reports agree.
    async fn is_the_same(&self) {
        assert_eq!(ready(&self.daemon, self.request.clone()).await, self.answer);
        assert_eq!(
            self.daemon
                .pod_devices(&pod("one"))
                .await
                .expect("it is known"),
            self.answer
        );
        let held = agree(&self.daemon).await;
        assert_eq!(held.len(), 4, "{held:?}");
        assert!(
            held.values()
                .all(|pods| pods.len() == 1 && pods.contains("pod-one")),
            "{held:?}"
        );
    }

    /// Each container starts twice, and the plugin is called each time, and was asked for nothing since.
    async fn containers_start(&self) {
        for (name, ..) in [KINDS, KINDS].concat() {
            let started = start(&self.daemon, "one", name)
                .await
                .expect("it may start");
            assert_eq!(started, expected(self.daemon.path(), name, &self.ids(name)));
            let is_call =
                |event: &Event| matches!(event, Event::Allocate { .. } | Event::PreStart { .. });
            let event = until_event(self.plugin(), is_call).await;
            assert_eq!(
                event,
                Event::PreStart {
                    devices: self.ids(name)
                },
                "{name}"
            );
        }
    }

    /// The daemon is killed and comes back, the plugin does not.
    async fn crash_without_plugin(&mut self) {
        self.daemon.kill9().await;
        let plugin = self.plugin.take().expect("it is here");
        plugin.die();
        plugin.remove_sockets().expect("remove the sockets");
        self.daemon.run().await;
        let nic = self.daemon.until_resource(NIC, |_| true).await;
        assert_eq!((nic.active, nic.allocatable, nic.allocated), (false, 0, 4));
        self.is_the_same().await;
        let refused = start(&self.daemon, "one", "main")
            .await
            .expect_err("the plugin wants the call");
        assert!(
            refused.code() == Code::Unavailable && refused.message().contains(NIC),
            "{refused:?}"
        );
        let problem = short(&self.daemon, limited("other", &[(NIC, 1)])).await;
        assert!(problem.message.contains(NIC), "{problem:?}");
    }

    async fn end(self) {
        let outcomes = freed(&self.daemon, "one").await;
        assert_eq!(
            outcomes,
            KINDS.map(|(name, ..)| (name.into(), NIC.into(), "freed".into()))
        );
        assert!(agree(&self.daemon).await.is_empty());
        assert!(
            freed(&self.daemon, "one").await.is_empty(),
            "again is success"
        );
        let all = ready(&self.daemon, limited("two", &[(NIC, 5)])).await;
        assert_eq!(
            ids(&all, "main", NIC),
            nics(5).into_iter().map(|nic| nic.id).collect::<Vec<_>>()
        );
    }
}

async fn whole_life(options: impl Fn(&Daemon) -> PluginOptions) {
    let mut life = Life::begin(options).await;
    life.devices_are_right();
    life.plugin_was_asked().await;
    life.is_the_same().await;
    life.containers_start().await;
    life.crash_without_plugin().await;
    life.bring_plugin().await;
    life.is_the_same().await;
    life.containers_start().await;
    life.daemon.restart().await;
    life.plugin = None;
    // Else the devices of the old plugin pass for those of the new one.
    life.daemon
        .until_resource(NIC, |nic| nic.allocatable == 0)
        .await;
    life.bring_plugin().await;
    life.is_the_same().await;
    life.end().await;
}

#[tokio::test]
async fn calling_plugin_keeps_devices_until_end() {
    whole_life(|daemon| calling(daemon, NIC)).await;
}

#[tokio::test]
async fn watched_plugin_keeps_devices_until_end() {
    whole_life(|daemon| with_registration_socket(daemon, NIC)).await;
}

#[tokio::test]
async fn command_line_shows_resource_until_end() {
    let daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 2).await;
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: one, namespace: default, uid: pod-one}}\n\
         spec: {{containers: [{{name: main, resources: {{limits: {{{NIC}: 1, cpu: 500m}}}}}}]}}\n"
    );
    let file = daemon.write("pod.yaml", manifest);
    let output = daemon
        .cli(&["prepare", "-f", file.to_str().expect("UTF-8")])
        .await
        .done();
    assert!(
        output.contains(NIC) && output.contains("nic-0") && output.contains("NATIVE_DEVICES"),
        "{output}"
    );
    assert_eq!(until_allocate(&plugin).await, ["nic-0"]);
    let resource = [("resource_name", NIC)];
    for counter in ["registration_total", "alloc_duration_seconds_count"] {
        let counter = format!("kubelet_device_plugin_{counter}");
        assert_eq!(
            daemon.metrics().await.value(&counter, &resource),
            Some(1.0),
            "{counter}"
        );
    }
    let resources = daemon.cli(&["get", "resources", "-o", "json"]).await.json();
    let counted =
        ["capacity", "allocatable", "allocated", "active"].map(|field| resources[0][field].clone());
    assert_eq!(
        serde_json::json!(counted),
        serde_json::json!([2, 2, 1, true])
    );
    for (command, word) in [
        ("pods", "example.com/nic=1"),
        ("devices", "nic-1"),
        ("resources", NIC),
    ] {
        let output = daemon.cli(&["get", command]).await.done();
        assert!(output.contains(word), "{command}: {output}");
    }
    daemon
        .cli(&["unprepare", "default/one"])
        .await
        .done_with(&[NIC, "freed"]);
    assert!(agree(&daemon).await.is_empty());
}
