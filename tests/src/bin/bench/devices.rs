//! Extended resources: devices of one native device plugin, by the node API, with few and many pods that have some; lists of the plugin,
//! until the daemon shows them; and pod resources, as monitoring agents ask for them.

use std::time::{Duration, Instant};

use native_device_plugin::api::device_plugin_client::DevicePluginClient;
use native_device_plugin::{Device, Options, Plugin, Script, api};
use nodedock_model::limit;
use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_proto::node::v1;
use nodedock_tests::node_api::channel;
use nodedock_tests::{Client, Daemon, Root, compose};
use rustix::process::Pid;

use crate::claims::storm;
use crate::table::{Table, Times};
use crate::{CdiOnTmpfs, Size};

const RESOURCE: &str = "bench.example.com/device";
/// Devices that a pod wants.
const WANTED: u32 = 8;
/// Driver and pool of an adapter.
const DRIVER: &str = "bench.example.com/devices";
const ADAPTED: &str =
    "devicePluginAdapters: [{resource: bench.example.com/device, driver: bench.example.com}]\n";
/// Devices of a list beside which a long one is measured.
const FEW: usize = 10;
/// Devices of a node that has them for itself.
pub(crate) const ORDINARY: usize = 64;

pub(crate) async fn run(size: Size, table: &mut Table) {
    for pods in size.pods {
        let node = Node::start(size.devices).await;
        node.fill(pods, WANTED).await;
        one_at_a_time(&node, size, pods, table).await;
    }
    adapted(size, table).await;
    lists(size, table).await;
    pod_resources(size, table).await;
}

/// A daemon, and the only device plugin of it.
pub(crate) struct Node {
    daemon: Daemon,
    plugin: Plugin,
    _cdi: CdiOnTmpfs,
}

impl Node {
    pub(crate) async fn start(devices: usize) -> Self {
        Self::start_with(devices, "").await
    }

    pub(crate) fn client(&self) -> Client {
        self.daemon.client()
    }

    pub(crate) fn pid(&self) -> Pid {
        self.daemon.pid()
    }

    /// Gives devices to pods that stay.
    pub(crate) async fn fill(&self, pods: usize, wanted: u32) {
        let requests = (0..pods).map(|n| request(&format!("live-{n}"), wanted));
        let (_, failed) = storm(self.client(), requests.collect()).await;
        assert_eq!(failed, 0, "pods beside the measured ones");
    }

    async fn start_with(devices: usize, config: &str) -> Self {
        let cdi = CdiOnTmpfs::new();
        let daemon = Daemon::start_on(Root::new(), cdi.options().config(config)).await;
        let options = Options::new(RESOURCE, &daemon.state().join("device-plugins"));
        let plugin = Plugin::start(options, Script::ok(), healthy(devices))
            .await
            .expect("start a plugin");
        let node = Self {
            daemon,
            plugin,
            _cdi: cdi,
        };
        node.until_shown(devices, devices).await;
        node
    }

    /// Lists until so many devices are there, and so many of them healthy.
    async fn until_shown(&self, capacity: usize, allocatable: usize) {
        let mut client = self.daemon.client();
        let wanted = (capacity, allocatable);
        while shown(&mut client).await != Some(wanted) {}
    }
}

fn healthy(count: usize) -> Vec<Device> {
    (0..count)
        .map(|n| Device::healthy(&format!("device-{n:05}")).on(&[i64::from(n % 2 == 1)]))
        .collect()
}

/// Devices of the resource, and the healthy ones.
async fn shown(client: &mut Client) -> Option<(usize, usize)> {
    let answer = client
        .get_capacity(v1::GetCapacityRequest {})
        .await
        .expect("capacity")
        .into_inner();
    let resource = answer.resources.first()?;
    Some((resource.capacity as usize, resource.allocatable as usize))
}

/// A pod of one container that wants so many devices.
pub(crate) fn request(name: &str, wanted: u32) -> v1::PreparePodRequest {
    let mut request = compose::request(&compose::pod(name), &[]);
    request.containers[0]
        .extended_resources
        .insert(RESOURCE.to_owned(), wanted);
    request
}

async fn one_at_a_time(node: &Node, size: Size, pods: usize, table: &mut Table) {
    let bare_row = format!("bare Allocate of {WANTED} devices");
    if pods == size.pods[0] {
        table.times(&bare_row, &bare(node, size).await, "", "no daemon between");
    }
    let (mut allocates, mut frees) = (Times::default(), Times::default());
    let mut client = node.daemon.client();
    for n in 0..size.single {
        let request = request(&format!("pod-{n}"), WANTED);
        let pod = request.pod.clone();
        let answer = allocates
            .time(client.prepare_pod(request))
            .await
            .expect("prepare")
            .into_inner();
        assert_eq!(answer.resources[0].outcome, "allocated", "{answer:?}");
        frees
            .time(client.unprepare_pod(v1::UnpreparePodRequest { pod }))
            .await
            .expect("unprepare");
    }
    let row = |what: &str, pods: usize| {
        format!(
            "{what} {WANTED} of {} devices, {pods} live pods",
            size.devices
        )
    };
    let first = size.pods[0];
    let against = if pods == first {
        bare_row
    } else {
        row("allocate", first)
    };
    table.times(&row("allocate", pods), &allocates, &against, "");
    table.times(&row("free", pods), &frees, &row("free", first), "");
}

/// The same devices of the same plugin by claims of a driver that an adapter makes of it.
async fn adapted(size: Size, table: &mut Table) {
    let pods = size.pods[0];
    let node = Node::start_with(size.devices, ADAPTED).await;
    let devices: Vec<_> = healthy(WANTED as usize)
        .iter()
        .map(|device| format!("{DRIVER}/{}", device.id))
        .collect();
    let devices: Vec<_> = devices.iter().map(String::as_str).collect();
    let (mut prepares, mut unprepares) = (Times::default(), Times::default());
    let mut client = node.daemon.client();
    for n in 0..size.single {
        let pod = compose::pod(&format!("claiming-{n}"));
        let mut claim = compose::claim(&format!("claim-{n}"), &devices);
        // One request, so one Allocate.
        for device in claim
            .allocation
            .iter_mut()
            .flat_map(|allocation| &mut allocation.devices)
        {
            device.request = "devices".to_owned();
        }
        let request = compose::request(&pod, &[&claim]);
        let answer = prepares
            .time(client.prepare_pod(request))
            .await
            .expect("prepare")
            .into_inner();
        assert_eq!(answer.claims[0].outcome, "prepared", "{answer:?}");
        let request = v1::UnpreparePodRequest { pod: Some(pod) };
        unprepares
            .time(client.unprepare_pod(request))
            .await
            .expect("unprepare");
    }
    let beside = |what: &str| {
        format!(
            "{what} {WANTED} of {} devices, {pods} live pods",
            size.devices
        )
    };
    table.times(
        &format!("adapter: prepare a claim of {WANTED} devices"),
        &prepares,
        &beside("allocate"),
        "",
    );
    table.times(
        &format!("adapter: unprepare a claim of {WANTED} devices"),
        &unprepares,
        &beside("free"),
        "",
    );
}

/// The call to the plugin alone, as the daemon makes it, from here.
async fn bare(node: &Node, size: Size) -> Times {
    let mut client = DevicePluginClient::new(channel(node.plugin.options().socket()));
    let devices = healthy(WANTED as usize)
        .into_iter()
        .map(|device| device.id)
        .collect();
    let container = api::ContainerAllocateRequest {
        devices_ids: devices,
    };
    let request = api::AllocateRequest {
        container_requests: vec![container],
    };
    let mut times = Times::default();
    for _ in 0..size.single {
        times
            .time(client.allocate(request.clone()))
            .await
            .expect("a bare call");
    }
    times
}

/// Measures the time from the plugin's list to an answer that shows it.
async fn lists(size: Size, table: &mut Table) {
    let node = Node::start(FEW).await;
    let few = format!("list of {FEW} devices, until shown");
    table.times(
        &few,
        &listed(&node, size, FEW, FEW - 1).await,
        "",
        "a device more or less",
    );
    node.plugin.list(healthy(size.devices));
    node.until_shown(size.devices, size.devices).await;
    let many = format!("list of {} devices, until shown", size.devices);
    let note = "a device more or less";
    table.times(
        &many,
        &listed(&node, size, size.devices, size.devices - 1).await,
        &few,
        note,
    );
    let health = format!("health of one of {} devices, until shown", size.devices);
    table.times(&health, &flapped(&node, size).await, &many, "");
    let mut client = node.daemon.client();
    let mut asked = Times::default();
    for _ in 0..size.lists {
        asked.time(shown(&mut client)).await;
    }
    table.times(
        "the question that shows it",
        &asked,
        &many,
        "GetCapacity; the rows above are exact to one",
    );
}

/// Lists of one length and of the other, in turn.
async fn listed(node: &Node, size: Size, one: usize, other: usize) -> Times {
    let mut times = Times::default();
    for n in 0..size.lists {
        let count = if n % 2 == 0 { other } else { one };
        times.add(taken_in(node, healthy(count), (count, count)).await);
    }
    times
}

/// Measures the changes of a device to unhealthy and back to healthy.
async fn flapped(node: &Node, size: Size) -> Times {
    let mut times = Times::default();
    for n in 0..size.lists {
        let mut devices = healthy(size.devices);
        let is_ill = n % 2 == 0;
        devices[0].healthy = !is_ill;
        times.add(
            taken_in(
                node,
                devices,
                (size.devices, size.devices - usize::from(is_ill)),
            )
            .await,
        );
    }
    times
}

async fn taken_in(
    node: &Node,
    devices: Vec<Device>,
    (capacity, allocatable): (usize, usize),
) -> Duration {
    // A list that comes sooner than this after another is kept waiting, which is not what is measured.
    tokio::time::sleep(limit::LIST_PACE * 2).await;
    let started = Instant::now();
    node.plugin.list(devices);
    node.until_shown(capacity, allocatable).await;
    started.elapsed()
}

/// The list of all pods, at the pace that the API allows.
async fn pod_resources(size: Size, table: &mut Table) {
    let node = Node::start(size.devices).await;
    let row = |pods: usize| format!("pod resources List, {pods} pods");
    for pods in [0, size.listed_pods] {
        node.fill(pods, WANTED).await;
        let limit = limit::POD_RESOURCES_MESSAGE_BYTES_MAX;
        let client = PodResourcesListerClient::new(node.daemon.pod_resources_channel());
        let mut client = client.max_decoding_message_size(limit);
        let mut pace =
            tokio::time::interval(Duration::from_secs(1) / limit::POD_RESOURCES_PER_SECOND);
        let mut times = Times::default();
        for _ in 0..size.lists {
            pace.tick().await;
            let answer = times.time(client.list(ListPodResourcesRequest {})).await;
            let answer = answer.expect("a list").into_inner();
            assert_eq!(answer.pod_resources.len(), pods);
        }
        table.times(
            &row(pods),
            &times,
            &row(0),
            &format!("each pod with {WANTED} devices"),
        );
    }
}
