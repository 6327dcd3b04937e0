//! Generated histories of a node: pods come and go, lists change, plugins refuse and leave, the daemon crashes at any commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use crate::manager::ResourceState;
use crate::manager::devices::fixtures::{device, resource, sick};
use crate::manager::tests::scene::{Daemon, FakePlugin, Home, PluginCalls, container};
use nodedock_model::{ContainerKind, ExtendedResource, PluginDevice, PodContainer, Problem};

#[derive(Debug, Clone)]
enum Event {
    Allocate {
        pod: usize,
    },
    /// The checkpoint takes nothing from the moment when the plugin is asked; a restart follows.
    CrashIn {
        pod: usize,
    },
    Free {
        pod: usize,
    },
    /// The plugin lists its devices, of which these are healthy.
    List {
        healthy: u8,
    },
    Leave,
    Refuse,
    Restart,
}

const PODS: [&str; 4] = ["a", "b", "c", "d"];
const DEVICES: usize = 5;

/// A pod always asks for the same.
fn containers(pod: usize) -> Vec<PodContainer> {
    use ContainerKind::{App, Init, Sidecar};
    match pod {
        0 => vec![container("main", App, &[("gpu", 1)])],
        1 => vec![
            container("init", Init, &[("gpu", 2)]),
            container("main", App, &[("gpu", 1)]),
        ],
        2 => vec![
            container("side", Sidecar, &[("gpu", 1)]),
            container("main", App, &[("gpu", 1)]),
        ],
        _ => vec![container("main", App, &[("gpu", 3)])],
    }
}

fn listed(healthy: u8) -> Vec<PluginDevice> {
    let one = |n: usize| {
        let id = format!("dev{n}");
        if healthy & 1 << n != 0 {
            device(&id, &[])
        } else {
            sick(&id)
        }
    };
    (0..DEVICES).map(one).collect()
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..PODS.len()).prop_map(|pod| Event::Allocate { pod }),
        2 => (0..PODS.len()).prop_map(|pod| Event::CrashIn { pod }),
        3 => (0..PODS.len()).prop_map(|pod| Event::Free { pod }),
        2 => any::<u8>().prop_map(|healthy| Event::List { healthy }),
        1 => Just(Event::Leave),
        1 => Just(Event::Refuse),
        1 => Just(Event::Restart),
    ]
}

type Given = BTreeMap<(String, ExtendedResource), BTreeSet<String>>;

/// A node, and what its pods were answered.
struct Node {
    home: Home,
    daemon: Daemon,
    gpu: Arc<FakePlugin>,
    healthy: u8,
    answered: BTreeMap<usize, Given>,
}

impl Node {
    fn new() -> Self {
        let (home, gpu) = (Home::new(), FakePlugin::preferring(&["dev4", "dev2"]));
        let daemon = home.start_at_once();
        let node = Self {
            home,
            daemon,
            gpu,
            healthy: 0xff,
            answered: BTreeMap::new(),
        };
        node.plug();
        node
    }

    fn plug(&self) -> crate::manager::devices::PluginId {
        self.daemon.plug("gpu", &self.gpu, &listed(self.healthy))
    }

    async fn step(&mut self, event: &Event) {
        match event {
            Event::Allocate { pod } => self.allocate(*pod).await,
            Event::CrashIn { pod } => self.crash_in(*pod).await,
            Event::Free { pod } => {
                self.daemon.free(PODS[*pod]).await.unwrap();
                self.answered.remove(pod);
            }
            Event::List { healthy } => {
                self.healthy = *healthy;
                self.plug();
            }
            Event::Leave => {
                let id = self.plug();
                self.daemon
                    .manager
                    .devices
                    .plugin_left(&id, &Problem::unavailable("eof", "its stream ended"));
            }
            Event::Refuse => self
                .gpu
                .refuse(Problem::internal("broken", "the plugin cannot")),
            Event::Restart => self.restart().await,
        }
    }

    async fn allocate(&mut self, pod: usize) {
        let outcomes = self.daemon.allocate(PODS[pod], &containers(pod)).await;
        assert_eq!(outcomes.len(), containers(pod).len());
        for outcome in outcomes {
            let key = (outcome.container, outcome.resource);
            let known = self.answered.entry(pod).or_default();
            match outcome.end {
                Err(problem) => assert!(
                    !known.contains_key(&key),
                    "taken from a pod that has it: {problem}"
                ),
                Ok(devices) => {
                    let devices: BTreeSet<_> = devices.into_keys().collect();
                    let before = known.entry(key).or_insert_with(|| devices.clone());
                    assert_eq!(*before, devices, "a pod's devices are final");
                }
            }
        }
    }

    async fn crash_in(&mut self, pod: usize) {
        let wanted = containers(pod);
        let before = self.gpu.calls();
        let (allocated, preferred) = (before.allocate.len(), before.preferred.len());
        self.gpu.shut(true);
        {
            // Not kept as answered: a caller of a daemon that crashed hears nothing.
            let allocate = self.daemon.allocate(PODS[pod], &wanted);
            let crash = async {
                let is_asked = |calls: &PluginCalls| {
                    calls.allocate.len() > allocated || calls.preferred.len() > preferred
                };
                self.gpu.called(is_asked).await;
                self.daemon.crash().await;
                self.gpu.shut(false);
            };
            // One that is answered without the plugin does not get to the crash.
            tokio::pin!(allocate, crash);
            tokio::select! {
                biased;
                _ = &mut allocate => {}
                () = &mut crash => drop(allocate.await),
            }
        }
        self.gpu.shut(false);
        self.restart().await;
    }

    async fn restart(&mut self) {
        let before = self.daemon.manager.pods.list();
        self.daemon.checkpoint().close().await;
        let next = self.home.start_at_once();
        let old = std::mem::replace(&mut self.daemon, next);
        drop(old);
        for pod in &before {
            let found = self.daemon.manager.pods.get(pod.pod.uid.as_str());
            let found = found
                .unwrap_or_else(|| panic!("{} is lost", pod.pod))
                .resources;
            for known in pod
                .resources
                .iter()
                .filter(|known| known.state == ResourceState::Allocated)
            {
                assert!(found.contains(known), "{known:?} is lost");
            }
        }
        self.plug();
    }

    fn check(&self) {
        let mut owners = BTreeMap::new();
        let pods = self.daemon.manager.pods.list();
        for pod in &pods {
            assert!(!pod.resources.is_empty());
            for known in &pod.resources {
                for id in known.devices.keys() {
                    let owner = owners.entry((&known.resource, id)).or_insert(&pod.pod);
                    assert_eq!(*owner, &pod.pod, "{id} is given twice");
                }
            }
        }
        for (pod, given) in &self.answered {
            for ((name, resource), devices) in given {
                let found = self.daemon.devices_of(PODS[*pod]);
                let entry = found
                    .iter()
                    .find(|of| of.container == *name && of.resource == *resource);
                let entry = entry.expect("what was answered is kept");
                assert!(
                    entry.state == ResourceState::Allocated && entry.devices.keys().eq(devices)
                );
            }
        }
        let shown: usize = self
            .daemon
            .view("gpu")
            .unwrap()
            .devices
            .iter()
            .filter(|d| !d.pods.is_empty())
            .count();
        assert_eq!(
            shown,
            owners
                .keys()
                .filter(|(of, _)| **of == resource("gpu"))
                .count()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn devices_are_never_allocated_twice(events in prop::collection::vec(event(), 1..16)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut node = Node::new();
            for event in &events {
                node.step(event).await;
                node.check();
            }
        });
    }
}
