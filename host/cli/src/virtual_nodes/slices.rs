//! The slices of all nodes: one watch of all slices of the cluster, and for every node the task that a daemon has for its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{Semaphore, watch};

use super::Nodes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_kube::client::KubeClient;
use nodedock_kube::extended_resources::{ExtendedResources, Mechanism};
use nodedock_kube::facts::Facts;
use nodedock_kube::fleet::{watch_nodes, watch_slices_by_node};
use nodedock_kube::slices::{self, FailedDevices, SliceParts, SliceReport, SliceSettings};

/// Slices that are written at the same time: a request that waits long for the rate would fail.
const WRITES: usize = 8;

/// Numbers of what has been published and of what has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Published {
    pub(super) pools: usize,
    pub(super) of: usize,
    pub(super) devices: usize,
    pub(super) slices: usize,
}

pub(super) struct Publishing {
    nodes: Nodes,
    report: SliceReport,
}

impl Publishing {
    pub(super) fn progress(&self) -> Published {
        let of = self.nodes.values().map(|node| node.pool_count()).sum();
        let mut progress = Published {
            pools: 0,
            of,
            devices: 0,
            slices: 0,
        };
        for status in self
            .report
            .pools()
            .into_values()
            .filter(|status| status.is_current)
        {
            progress.pools += usize::from(status.devices > 0);
            progress.devices += status.devices;
            progress.slices += status.slices;
        }
        progress
    }
}

pub(super) fn start(
    nodes: &Nodes,
    client: &KubeClient,
    creates_nodes: bool,
    conditions: &Conditions,
    tasks: &Tasks,
) -> Publishing {
    let (report, turns) = (SliceReport::default(), Arc::new(Semaphore::new(WRITES)));
    let mut known = BTreeMap::new();
    let (events, distribute) = watch_slices_by_node(client, nodes.keys().cloned().collect());
    for (node, events) in nodes.values().zip(events.into_values()) {
        let (publish, facts) = watch::channel(None);
        known.insert(node.name.clone(), publish);
        let parts = SliceParts {
            kube: client.clone(),
            turns: Arc::clone(&turns),
            drivers: node.drivers(),
            node: Facts::given(facts),
            names: node.pool_names(),
            own_devices: Arc::default(),
            on_unhealthy: Arc::new(|_| {}),
            settings: watch::channel(SliceSettings::default()).1,
            failed: watch::channel(FailedDevices::default()).1,
            // A virtual node has no kubelet, so what it would allocate is not simulated.
            extended_resources: ExtendedResources::fixed(Mechanism::DevicePlugin),
            conditions: conditions.clone(),
            report: report.clone(),
            tasks: tasks.clone(),
        };
        slices::start(parts, events);
    }
    tasks.spawn_until_stopped("slices-of-all-nodes", distribute);
    tasks.spawn_until_stopped("nodes", watch_nodes(client.clone(), known, creates_nodes));
    Publishing {
        nodes: Arc::clone(nodes),
        report,
    }
}
