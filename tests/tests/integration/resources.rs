//! Extended resources from a plugin's registration, or a driver's pool, to the end of the pod that has them.

mod adapters;
mod agreement;
mod answers;
mod lists;
mod plugins;
mod pools;
mod together;

use native_device_plugin::{Device, Event, Options as PluginOptions, Plugin, Register, Script};
use nodedock_proto::node::v1;
use nodedock_tests::compose::pod;
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{DEADLINE, Daemon};
use tokio::time::timeout;

const NIC: &str = "example.com/nic";
const GPU: &str = "example.com/gpu";
/// Three simulated GPUs under the name `GPU`.
const GPUS: &str = "pools:\n- {name: gpus, count: 3, extendedResource: example.com/gpu}\n";

/// A plugin of a resource that calls `kubelet.sock`.
fn calling(daemon: &Daemon, resource: &str) -> PluginOptions {
    PluginOptions::new(resource, &daemon.state().join("device-plugins"))
}

/// A plugin of a resource with a registration socket.
fn with_registration_socket(daemon: &Daemon, resource: &str) -> PluginOptions {
    let registry = daemon.state().join("plugins_registry");
    PluginOptions {
        register: Register::PluginsRegistry(registry),
        ..calling(daemon, resource)
    }
}

fn nics(count: usize) -> Vec<Device> {
    (0..count)
        .map(|n| Device::healthy(&format!("nic-{n}")))
        .collect()
}

/// A plugin that registered and whose devices are there.
async fn started(
    daemon: &Daemon,
    options: PluginOptions,
    script: Script,
    devices: Vec<Device>,
) -> Plugin {
    let (resource, healthy) = (
        options.resource.clone(),
        devices.iter().filter(|d| d.healthy).count(),
    );
    let plugin = Plugin::start(options, script, devices)
        .await
        .expect("it registers");
    daemon.until_allocatable(&resource, healthy).await;
    plugin
}

/// A plugin of `NIC` that registered and whose devices are there.
async fn with_nics(daemon: &Daemon, script: Script, count: usize) -> Plugin {
    started(daemon, calling(daemon, NIC), script, nics(count)).await
}

/// Installs the simulated GPUs, and waits until they are there as a resource.
async fn with_gpus(daemon: &Daemon) {
    daemon.install_gpus(GPUS);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_allocatable(GPU, 3).await;
}

/// The next event that is as wanted; those before it are passed over.
async fn until_event(plugin: &Plugin, wanted: impl Fn(&Event) -> bool) -> Event {
    let next = async {
        loop {
            let event = plugin.event().await;
            if wanted(&event) {
                return event;
            }
        }
    };
    timeout(DEADLINE, next)
        .await
        .expect("the plugin waits for an event in vain")
}

async fn until_allocate(plugin: &Plugin) -> Vec<String> {
    match until_event(plugin, |event| matches!(event, Event::Allocate { .. })).await {
        Event::Allocate { devices, .. } => devices,
        other => panic!("{other:?}"),
    }
}

fn container(name: &str, kind: &str, resources: &[(&str, u32)]) -> v1::Container {
    let limit = |(name, count): &(&str, u32)| ((*name).to_owned(), *count);
    v1::Container {
        name: name.to_owned(),
        kind: kind.to_owned(),
        extended_resources: resources.iter().map(limit).collect(),
        ..Default::default()
    }
}

fn request_of(name: &str, containers: Vec<v1::Container>) -> v1::PreparePodRequest {
    v1::PreparePodRequest {
        pod: Some(pod(name)),
        containers,
        ..Default::default()
    }
}

/// A pod with one container that has these limits.
fn limited(name: &str, resources: &[(&str, u32)]) -> v1::PreparePodRequest {
    request_of(name, vec![container("main", "", resources)])
}

/// Prepares, and expects everything that was asked for.
async fn ready(daemon: &Daemon, request: v1::PreparePodRequest) -> v1::PreparePodResponse {
    let answer = daemon.prepared(request).await;
    let allocated = answer
        .resources
        .iter()
        .all(|resource| resource.outcome == "allocated");
    assert!(
        allocated && !answer.containers.is_empty(),
        "{answer:#?}\n{}",
        daemon.log()
    );
    answer
}

/// Prepares, and expects that some resource is refused, which leaves the pod without an answer. The problem of the only refusal.
async fn short(daemon: &Daemon, request: v1::PreparePodRequest) -> v1::Problem {
    refusal(daemon.prepare(request).await)
}

#[track_caller]
fn refusal(answer: v1::PreparePodResponse) -> v1::Problem {
    assert!(
        answer.containers.is_empty(),
        "a refused pod gets no devices: {answer:#?}"
    );
    let mut refused: Vec<_> = answer
        .resources
        .iter()
        .filter(|resource| resource.outcome == "refused")
        .cloned()
        .collect();
    assert_eq!(refused.len(), 1, "{answer:#?}");
    assert!(refused[0].device_ids.is_empty(), "{refused:?}");
    let problem = refused.remove(0).problem.expect("a refusal has a problem");
    assert!(
        !problem.message.is_empty() && !problem.code.is_empty(),
        "{problem:?}"
    );
    problem
}

/// The devices of a container.
fn ids(answer: &v1::PreparePodResponse, container: &str, resource: &str) -> Vec<String> {
    let is_of = |of: &&v1::ResourceOutcome| of.container == container && of.resource == resource;
    let found = answer.resources.iter().find(is_of);
    found
        .unwrap_or_else(|| panic!("{container} has no {resource}: {answer:#?}"))
        .device_ids
        .clone()
}

/// Returns the result of an unprepare, by container and resource.
async fn freed(daemon: &Daemon, name: &str) -> Vec<(String, String, String)> {
    let answer = daemon.unprepare_pod(&pod(name)).await;
    answer
        .resources
        .into_iter()
        .map(|of| (of.container, of.resource, of.outcome))
        .collect()
}

async fn start(
    daemon: &Daemon,
    name: &str,
    container: &str,
) -> Result<v1::ContainerDevices, tonic::Status> {
    let request = v1::StartContainerRequest {
        pod: Some(pod(name)),
        container: container.to_owned(),
    };
    daemon
        .client()
        .start_container(request)
        .await
        .map(tonic::Response::into_inner)
}
