//! The kubelet's messages, from and to the model. Versions of one API have the same fields, but for a device's share in `v1`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nodedock_proto::kubelet::device_plugin::v1beta1 as plugin;
use nodedock_proto::kubelet::dra::v1 as dra;
use nodedock_proto::kubelet::dra_health::v1 as health;
use nodedock_proto::kubelet::pod_resources::v1 as pods;
use nodedock_proto::kubelet::registration::PluginInfo;
use nodedock_proto::prost::Message;
use tonic::Status;

use super::plugin_claim::Ids;
use nodedock_base::printable::{one_line, shorten};
use nodedock_core::driver::DeviceOptions;
use nodedock_core::manager::devices::closest;
use nodedock_model::limit::{
    ALLOCATE_CONTAINERS_MAX, HEALTH_MESSAGE_BYTES_MAX, HEALTH_TIMEOUT, PLUGIN_ANSWER_BYTES_MAX,
    PROBLEM_MESSAGE_BYTES_MAX,
};
use nodedock_model::{
    ContainerAllocation, DriverName, ExtendedResource, HealthReport, HealthState, KubeletDevice,
    PluginDevice, Problem, ProblemCode,
};
use nodedock_model::{DraService, HealthService};

/// The version of the device plugin API.
pub(super) const DEVICE_PLUGIN_VERSION: &str = "v1beta1";
/// Characters of a kubelet's text that are repeated to it.
const SHOWN_CHARS_MAX: usize = 128;
/// Bytes of a device in a list of health beside its message: names of 253 and 63 bytes, numbers, tags and lengths.
const HEALTH_BYTES: usize = 400;

/// Outcomes of a call by the UIDs that were asked for.
pub(super) type Outcomes = Vec<(String, Result<Vec<KubeletDevice>, Problem>)>;

/// A message as one of another version of its API; fields that it does not have are left out.
pub(super) fn transcode<From: Message, To: Message + Default>(
    message: &From,
) -> Result<To, Status> {
    let transcoded = To::decode(message.encode_to_vec().as_slice());
    transcoded
        .map_err(|error| Status::internal(format!("the versions of a message differ: {error}")))
}

/// Returns the description of a driver. A kubelet takes the first service that it knows, so the newest is first.
pub(super) fn plugin_info(driver: &DriverName, endpoint: &Path) -> PluginInfo {
    let services = DraService::ALL.map(DraService::listed_as);
    let health = HealthService::ALL.map(HealthService::listed_as);
    PluginInfo {
        r#type: "DRAPlugin".to_owned(),
        name: driver.to_string(),
        endpoint: endpoint.display().to_string(),
        supported_versions: services
            .into_iter()
            .chain(health)
            .map(str::to_owned)
            .collect(),
    }
}

pub(super) fn prepared(outcomes: Outcomes) -> dra::NodePrepareResourcesResponse {
    let answers = outcomes.into_iter().map(|(uid, outcome)| {
        let (devices, error) = match outcome {
            Ok(devices) => (devices.into_iter().map(dra_device).collect(), String::new()),
            Err(problem) => (Vec::new(), error(&problem)),
        };
        (uid, dra::NodePrepareResourceResponse { devices, error })
    });
    answers.collect()
}

fn dra_device(device: KubeletDevice) -> dra::Device {
    dra::Device {
        request_names: device.requests,
        pool_name: device.pool.to_string(),
        device_name: device.device.to_string(),
        cdi_device_ids: device.cdi,
        share_id: device.share_id,
    }
}

pub(super) fn unprepared(outcomes: Outcomes) -> dra::NodeUnprepareResourcesResponse {
    let answers = outcomes.into_iter().map(|(uid, outcome)| {
        let error = outcome.err().as_ref().map(error).unwrap_or_default();
        (uid, dra::NodeUnprepareResourceResponse { error })
    });
    answers.collect()
}

/// A problem as the text of one claim's answer, which ends up in an Event of the pod.
fn error(problem: &Problem) -> String {
    one_line(
        &format!("{} ({})", problem.message, problem.code),
        PROBLEM_MESSAGE_BYTES_MAX + 128,
    )
}

/// A whole list of devices' health, as it is known at `now_seconds` since the Unix epoch. Messages are shortened to what a kubelet keeps, and
/// shorter where so many devices would not fit into an answer that a kubelet takes.
pub(super) fn health(list: &HealthReport, now_seconds: u64) -> health::NodeWatchResourcesResponse {
    let room = (PLUGIN_ANSWER_BYTES_MAX / list.len().max(1)).saturating_sub(HEALTH_BYTES);
    let devices = list
        .iter()
        .map(|((pool, device), reported)| health::DeviceHealth {
            device: Some(health::DeviceIdentifier {
                pool_name: pool.to_string(),
                device_name: device.to_string(),
            }),
            health: health_status(reported.state).into(),
            last_updated_time: i64::try_from(now_seconds).unwrap_or(i64::MAX),
            health_check_timeout_seconds: i64::try_from(HEALTH_TIMEOUT.as_secs()).unwrap_or(0),
            message: shorten(&reported.message, room.min(HEALTH_MESSAGE_BYTES_MAX)),
        });
    health::NodeWatchResourcesResponse {
        devices: devices.collect(),
    }
}

fn health_status(state: HealthState) -> health::HealthStatus {
    match state {
        HealthState::Unknown => health::HealthStatus::Unknown,
        HealthState::Healthy => health::HealthStatus::Healthy,
        HealthState::Unhealthy => health::HealthStatus::Unhealthy,
    }
}

/// Converts the options of a device plugin for a kubelet, which ignores them in the registration and calls for them again.
pub(super) fn options(options: DeviceOptions) -> plugin::DevicePluginOptions {
    plugin::DevicePluginOptions {
        pre_start_required: options.pre_start_required,
        get_preferred_allocation_available: options.preferred_allocation_available,
    }
}

pub(super) fn list(devices: &[PluginDevice]) -> plugin::ListAndWatchResponse {
    plugin::ListAndWatchResponse {
        devices: devices.iter().map(plugin_device).collect(),
    }
}

fn plugin_device(device: &PluginDevice) -> plugin::Device {
    plugin::Device {
        id: device.id.clone(),
        health: if device.healthy {
            "Healthy"
        } else {
            "Unhealthy"
        }
        .to_owned(),
        // A topology without nodes would hide the device from pod-resources.
        topology: (!device.numa_nodes.is_empty()).then(|| plugin::TopologyInfo {
            nodes: device
                .numa_nodes
                .iter()
                .map(|node| plugin::NumaNode {
                    id: i64::from(*node),
                })
                .collect(),
        }),
    }
}

/// The devices for each container; no device is for two of them.
pub(super) fn allocate_request(request: plugin::AllocateRequest) -> Result<Vec<Ids>, Problem> {
    let containers = request.container_requests;
    if containers.len() > ALLOCATE_CONTAINERS_MAX {
        let count = containers.len();
        let message = format!(
            "the request is for {count} containers, and at most {ALLOCATE_CONTAINERS_MAX} are taken"
        );
        return Err(Problem::invalid(ProblemCode::TooManyContainers, message));
    }
    let mut seen = BTreeSet::new();
    let mut requested = Vec::with_capacity(containers.len());
    for container in containers {
        let ids: Ids = container.devices_ids.into_iter().collect();
        if let Some(twice) = ids.iter().find(|id| seen.contains(*id)) {
            let message = format!("device {} is requested for two containers", shown(twice));
            return Err(Problem::invalid(ProblemCode::DeviceAskedTwice, message));
        }
        seen.extend(ids.iter().cloned());
        requested.push(ids);
    }
    Ok(requested)
}

/// Devices by CDI alone: a runtime that got the device nodes as well would have each of them twice, and a kubelet that does not know
/// the field (before 1.28) does not run on a node whose drivers need CDI.
pub(super) fn container(allocation: ContainerAllocation) -> plugin::ContainerAllocateResponse {
    let ContainerAllocation {
        cdi_devices,
        annotations,
        ..
    } = allocation;
    let cdi_devices = cdi_devices
        .into_iter()
        .map(|name| plugin::CdiDevice { name })
        .collect();
    plugin::ContainerAllocateResponse {
        cdi_devices,
        annotations,
        ..Default::default()
    }
}

/// A native device plugin's answer for a container, as it gave it.
pub(super) fn container_of_plugin(
    allocation: ContainerAllocation,
) -> plugin::ContainerAllocateResponse {
    let ContainerAllocation {
        env,
        mounts,
        device_nodes,
        annotations,
        cdi_devices,
    } = allocation;
    plugin::ContainerAllocateResponse {
        envs: env,
        mounts: mounts
            .into_iter()
            .map(|mount| plugin::Mount {
                container_path: mount.container_path,
                host_path: mount.host_path,
                read_only: mount.read_only,
            })
            .collect(),
        devices: device_nodes
            .into_iter()
            .map(|node| plugin::DeviceSpec {
                container_path: node.container_path,
                host_path: node.host_path,
                permissions: node.permissions,
            })
            .collect(),
        annotations,
        cdi_devices: cdi_devices
            .into_iter()
            .map(|name| plugin::CdiDevice { name })
            .collect(),
    }
}

/// Selects those of the available devices that are closest together.
pub(super) fn preferred(
    devices: &[PluginDevice],
    request: &plugin::ContainerPreferredAllocationRequest,
) -> plugin::ContainerPreferredAllocationResponse {
    let known: BTreeMap<&str, &PluginDevice> = devices
        .iter()
        .map(|device| (device.id.as_str(), device))
        .collect();
    let ids: BTreeSet<&String> = request
        .available_device_ids
        .iter()
        .chain(&request.must_include_device_ids)
        .collect();
    let available: Vec<PluginDevice> = ids
        .into_iter()
        .map(|id| {
            known.get(id.as_str()).map_or_else(
                || PluginDevice {
                    id: id.clone(),
                    healthy: true,
                    numa_nodes: Vec::new(),
                },
                |device| (*device).clone(),
            )
        })
        .collect();
    let size = usize::try_from(request.allocation_size).unwrap_or(0);
    let device_ids = closest(
        &available.iter().collect::<Vec<_>>(),
        &request.must_include_device_ids,
        size,
    );
    plugin::ContainerPreferredAllocationResponse { device_ids }
}

/// A kubelet's list of pods.
#[derive(Debug, Default)]
pub(super) struct PodDevices {
    /// Devices that pods use, by resource.
    pub(super) in_use: BTreeMap<ExtendedResource, Ids>,
    /// Namespace and name of every pod in the list.
    pub(super) pods: BTreeSet<(String, String)>,
}

/// Extended resources with names that could not be offered are left out.
pub(super) fn pod_devices(answer: pods::ListPodResourcesResponse) -> PodDevices {
    let mut listed = PodDevices::default();
    for pod in answer.pod_resources {
        for entry in pod
            .containers
            .into_iter()
            .flat_map(|container| container.devices)
        {
            let Ok(resource) = ExtendedResource::new(&entry.resource_name) else {
                continue;
            };
            listed
                .in_use
                .entry(resource)
                .or_default()
                .extend(entry.device_ids);
        }
        listed.pods.insert((pod.namespace, pod.name));
    }
    listed
}

pub(super) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    format!("{cut:?}")
}

#[cfg(test)]
mod tests {
    use nodedock_proto::kubelet::dra::v1beta1;

    use super::*;
    use nodedock_model::limit::DEVICES_MAX;
    use nodedock_model::{DeviceHealth, DeviceName, PoolName};

    #[test]
    fn every_claim_has_a_result() {
        let device = KubeletDevice {
            requests: vec!["gpu".into()],
            pool: PoolName::new("node-1").unwrap(),
            device: DeviceName::new("gpu-0").unwrap(),
            cdi: vec!["example.com/gpu=0".into(), "example.com/gpu=1".into()],
            share_id: Some("s-1".into()),
        };
        let refused = Problem::conflict("device-held", "claim default/a\nholds it");
        let outcomes: Outcomes = vec![
            ("u1".into(), Ok(vec![device])),
            ("u2".into(), Ok(Vec::new())),
            ("".into(), Err(refused)),
        ];
        let beta: v1beta1::NodePrepareResourcesResponse =
            transcode(&prepared(outcomes.clone())).unwrap();
        let (v1, beta) = (prepared(outcomes.clone()).into_claims(), beta.into_claims());
        let expected = dra::Device {
            request_names: vec!["gpu".into()],
            pool_name: "node-1".into(),
            device_name: "gpu-0".into(),
            cdi_device_ids: vec!["example.com/gpu=0".into(), "example.com/gpu=1".into()],
            share_id: Some("s-1".into()),
        };
        assert_eq!(
            transcode::<_, v1beta1::Device>(&expected).unwrap(),
            beta["u1"].devices[0]
        );
        assert_eq!((v1.len(), &v1["u1"].devices[..]), (3, &[expected][..]));
        assert_eq!(
            (&v1["u2"], beta.len()),
            (&dra::NodePrepareResourceResponse::default(), 3)
        );
        let error = "claim default/a holds it (device-held)";
        assert_eq!((&v1[""].error[..], &beta[""].error[..]), (error, error));
        let gone = unprepared(outcomes).into_claims();
        assert_eq!(
            (gone.len(), &gone["u1"].error[..], &gone[""].error[..]),
            (3, "", error)
        );
    }

    #[test]
    fn largest_health_list_fits_a_response() {
        let pool = [
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(61),
        ]
        .join(".");
        let pool = PoolName::new(pool).unwrap();
        let reported = DeviceHealth {
            state: HealthState::Unhealthy,
            message: "é".repeat(HEALTH_MESSAGE_BYTES_MAX),
        };
        for devices in [1, 2000, DEVICES_MAX] {
            let device = |n| (pool.clone(), DeviceName::new(format!("{n:0>63}")).unwrap());
            let list = (0..devices)
                .map(|n| (device(n), reported.clone()))
                .collect();
            let answer = health(&list, u64::MAX);
            assert!(
                answer.encoded_len() <= PLUGIN_ANSWER_BYTES_MAX,
                "{}",
                answer.encoded_len()
            );
            let message = answer.devices[0].message.len();
            assert!(
                (600..=HEALTH_MESSAGE_BYTES_MAX).contains(&message),
                "{message}"
            );
        }
    }

    fn device(id: &str, healthy: bool, numa_nodes: &[u32]) -> PluginDevice {
        PluginDevice {
            id: id.to_owned(),
            healthy,
            numa_nodes: numa_nodes.to_vec(),
        }
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_list_has_health_and_topology() {
        let listed = list(&[device("p/0", true, &[0, 1]), device("p/1", false, &[])]).devices;
        let nodes = [0, 1].map(|id| plugin::NumaNode { id }).to_vec();
        assert_eq!(
            (&listed[0].health[..], &listed[1].health[..]),
            ("Healthy", "Unhealthy")
        );
        assert_eq!(listed[0].topology, Some(plugin::TopologyInfo { nodes }));
        assert_eq!(listed[1].topology, None);
    }

    #[test]
    fn allocate_request_names_each_device_once() {
        let request = |containers: &[&[&str]]| plugin::AllocateRequest {
            container_requests: containers
                .iter()
                .map(|ids| plugin::ContainerAllocateRequest {
                    devices_ids: texts(ids),
                })
                .collect(),
        };
        let wanted = allocate_request(request(&[&["b", "a", "b"], &[]])).unwrap();
        assert_eq!(
            wanted,
            [Ids::from(["a".to_owned(), "b".to_owned()]), Ids::new()]
        );
        assert_eq!(
            allocate_request(request(&[&["a"], &["a"]]))
                .unwrap_err()
                .code,
            "device-asked-twice"
        );
        let many = vec![&["a"][..]; ALLOCATE_CONTAINERS_MAX + 1];
        assert_eq!(
            allocate_request(request(&many)).unwrap_err().code,
            "too-many-containers"
        );
    }

    #[test]
    fn preference_obeys_required_devices_and_numa() {
        let devices = [
            device("p/0", true, &[0]),
            device("p/1", true, &[1]),
            device("p/2", true, &[1]),
        ];
        let prefer = |available: &[&str], must: &[&str], size| {
            let request = plugin::ContainerPreferredAllocationRequest {
                available_device_ids: texts(available),
                must_include_device_ids: texts(must),
                allocation_size: size,
            };
            preferred(&devices, &request).device_ids
        };
        let all = ["p/0", "p/1", "p/2"];
        assert_eq!(prefer(&all, &[], 2), ["p/1", "p/2"]);
        assert_eq!(prefer(&all, &["p/0"], 2)[0], "p/0");
        assert_eq!(prefer(&all, &[], 9).len(), 3);
        assert_eq!(
            prefer(&["x", "p/1"], &["y"], 2)[0],
            "y",
            "an unknown device is answered as it was requested"
        );
        assert!(prefer(&all, &[], -1).is_empty() && prefer(&[], &[], 3).is_empty());
    }
}
