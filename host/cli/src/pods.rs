//! `nodedock prepare` and `nodedock unprepare`.

mod answer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use nodedock_proto::node::v1;
use tokio::time::timeout;
use uuid::Uuid;

use super::client::{Client, connect, is_connection_error};
use super::completion::Named;
use super::output::Format;
use super::{CommandError, Location, describe, files, local_api, names};
use nodedock_command::parameters;
use nodedock_core::manifest::{self, Objects, Written};
use nodedock_model::{
    AllocatedDevice, Allocation, Claim, ClaimReference, ConfigSource, Consumer, ContainerClaim,
    DeviceName, DriverName, ObjectName, ObjectRef, OpaqueConfig, PodContainer, PodRequest,
    PoolName, PoolNames, Uid,
};
use nodedockd::convert;

use answer::{PodOutput, finish};

/// Name of the container of a composed pod, and of its claim in the pod.
const CONTAINER: &str = "main";
const POD_CLAIM: &str = "devices";

/// Time for the daemon to make a new pod's claims from their templates.
const TEMPLATES_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct PrepareArgs {
    /// Pods and ResourceClaims as Kubernetes YAML or JSON: a file, a directory, or - for standard input; may be given several times. A pod without
    /// a UID gets one that is made from its name
    #[arg(
        short,
        long,
        value_name = "FILE",
        required_unless_present = "pod",
        conflicts_with = "pod"
    )]
    filename: Vec<PathBuf>,
    /// Compose a pod of this name instead, with --device or --claim; without them it is a pod of the local API, with all of its claims
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// Namespace of the pod, and of objects of files that name none [default: default; for users other than root user-UID]
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    namespace: String,
    /// A device for it, as `get devices` lists it or without the node; may be given several times
    #[arg(long, value_name = "DRIVER/[NODE/]POOL/DEVICE", requires = "pod", num_args = 1.., group = "for_pod", add = Named::WholeDevices.candidates())]
    device: Vec<String>,
    /// A claim of the local API for it; may be given several times
    #[arg(long, value_name = "NAME", requires = "pod", num_args = 1.., group = "for_pod", conflicts_with = "device", add = Named::ApiClaims.candidates())]
    claim: Vec<String>,
    /// Opaque parameters for the driver of the devices: a JSON object, or a file with JSON or YAML
    #[arg(long, value_name = "FILE|JSON", requires = "device")]
    parameters: Option<String>,
    /// Amount of a capacity that each device is to give, where several claims can share it, such as memory=8Gi [default: as the device's policy
    /// has it]; may be given several times
    #[arg(long, value_name = "NAME=QUANTITY", requires = "device")]
    capacity: Vec<String>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

impl PrepareArgs {
    /// Reads the contents of a composed pod.
    fn composed(&self) -> Result<Composed> {
        let parameters = self.parameters.as_deref().map(parameters::read);
        Ok(Composed {
            devices: self.device.clone(),
            parameters: parameters.transpose()?,
            amounts: parameters::amounts(&self.capacity)?,
        })
    }
}

/// The devices of a composed pod, and how it uses them.
#[derive(Default)]
struct Composed {
    devices: Vec<String>,
    /// JSON text.
    parameters: Option<String>,
    /// Amounts of capacities, by name.
    amounts: BTreeMap<String, String>,
}

impl Composed {
    /// Returns the text from which the claim's UID is made beside the devices: empty for a claim with neither parameters nor amounts.
    fn suffix(&self) -> String {
        let parameters = self.parameters.iter().map(|text| format!("/{text}"));
        let amounts = self.amounts.iter();
        let amounts = amounts.map(|(name, amount)| format!("/{name}={amount}"));
        parameters.chain(amounts).collect()
    }

    /// The parameters, for the driver of the devices.
    fn configs(&self, devices: &[AllocatedDevice]) -> Result<Vec<OpaqueConfig>, CommandError> {
        let (Some(parameters), Some(first)) = (&self.parameters, devices.first()) else {
            return Ok(Vec::new());
        };
        if let Some(other) = devices.iter().find(|other| other.driver != first.driver) {
            let message = format!(
                "parameters are for one driver, and the devices are of {} and {}",
                first.driver, other.driver
            );
            let hint = "prepare the devices of each driver for a pod of their own, or give the claim in a file";
            return Err(CommandError::usage(message, hint));
        }
        Ok(vec![OpaqueConfig {
            source: ConfigSource::Claim,
            requests: Vec::new(),
            driver: first.driver.clone(),
            parameters: parameters.clone(),
        }])
    }
}

#[derive(Args)]
pub(super) struct UnprepareArgs {
    #[arg(
        value_name = "NAMESPACE/POD",
        required_unless_present = "uid",
        conflicts_with = "uid",
        add = Named::Pods.candidates()
    )]
    pod: Option<String>,
    /// The pod by its UID
    #[arg(long)]
    uid: Option<String>,
    /// Succeed if the pod has no claims and no extended resources here
    #[arg(long)]
    ignore_not_found: bool,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

pub(super) async fn prepare(location: &Location, mut args: PrepareArgs) -> Result<()> {
    if args.namespace.is_empty() {
        args.namespace = local_api::namespace(location);
    }
    let composed = args.composed()?;
    let Objects {
        mut claims,
        mut pods,
        ..
    } = match &args.pod {
        Some(pod) if !args.claim.is_empty() => compose_with(&args.namespace, pod, &args.claim)?,
        Some(pod) if args.device.is_empty() => {
            from_local_api(location, &args.namespace, pod).await?
        }
        Some(pod) => compose(&args.namespace, pod, &composed, "")?,
        None => read(&args.filename, &args.namespace)?,
    };
    let mut client = connect(location).await?;
    if let Some(pod) = args.pod.as_ref().filter(|_| !args.device.is_empty()) {
        let node = client
            .get_node(v1::GetNodeRequest {})
            .await?
            .into_inner()
            .name;
        Objects { claims, pods, .. } = compose(&args.namespace, pod, &composed, &node)?;
    }
    if args.device.len() > 1 {
        let adapters = client
            .list_adapters(v1::ListAdaptersRequest {})
            .await?
            .into_inner()
            .adapters;
        join_requests(&mut claims, |driver| {
            adapters
                .iter()
                .any(|adapter| adapter.driver == driver.as_str())
        });
    }
    let mut answers = Vec::with_capacity(pods.len());
    for pod in &pods {
        let inline: Vec<_> = claims
            .iter()
            .filter(|claim| {
                claim.id.namespace == pod.pod.namespace
                    && pod.claims.iter().any(|c| c.claim_name == claim.id.name)
            })
            .cloned()
            .collect();
        let answer = client
            .prepare_pod(convert::pod_message(pod, &inline))
            .await?
            .into_inner();
        // Pods of users have no extended resources, whose plugins are called for each start.
        let failed = match location.user() {
            None => start_containers(&mut client, &answer).await?,
            Some(_) => Vec::new(),
        };
        answers.push(PodOutput::prepared(answer, failed));
    }
    finish(&answers, args.output)
}

pub(super) async fn unprepare(location: &Location, args: UnprepareArgs) -> Result<()> {
    let pod = match args.uid {
        Some(uid) => v1::ObjectRef {
            uid,
            ..Default::default()
        },
        None => names::object(args.pod.as_deref().unwrap_or_default()),
    };
    let mut client = connect(location).await?;
    let answer = client
        .unprepare_pod(v1::UnpreparePodRequest {
            pod: Some(pod.clone()),
        })
        .await?
        .into_inner();
    if answer.claims.is_empty() && answer.resources.is_empty() && !args.ignore_not_found {
        let name = match pod.uid.as_str() {
            "" => describe::name(&pod),
            uid => uid.to_owned(),
        };
        bail!(
            "no pod {name:?} has claims or extended resources here; `nodedock get pods` lists those that have, and --ignore-not-found makes this no error"
        );
    }
    finish(&[PodOutput::unprepared(answer)], args.output)
}

/// Does what a runtime does before it starts a container, for each container of a prepared pod, and returns the errors.
async fn start_containers(
    client: &mut Client,
    answer: &v1::PreparePodResponse,
) -> Result<Vec<String>> {
    let mut failed = Vec::new();
    // The daemon has no record of a pod without claims and resources.
    if answer.claims.is_empty() && answer.resources.is_empty() {
        return Ok(failed);
    }
    for container in &answer.containers {
        let request = v1::StartContainerRequest {
            pod: answer.pod.clone(),
            container: container.name.clone(),
        };
        let Err(status) = client.start_container(request).await else {
            continue;
        };
        if is_connection_error(&status) {
            return Err(status.into());
        }
        failed.push(format!(
            "container {}: {}",
            container.name,
            status.message()
        ));
    }
    Ok(failed)
}

/// Reads the objects of files. `namespace` is that of objects that name none.
fn read(given: &[PathBuf], namespace: &str) -> Result<Objects> {
    let written = Written {
        unknown_fields: nodedock_apiserver::unknown_fields,
        namespace,
        pod_uid,
    };
    let mut objects = Objects::default();
    for files::File { name, text } in files::read(given)? {
        let found = manifest::parse_written(&text, &name, &written)
            .with_context(|| format!("read {name}"))?;
        objects.claims.extend(found.claims);
        objects.pods.extend(found.pods);
        for object in found.skipped {
            files::skipped(&format!("{name}, {object}"));
        }
    }
    if objects.pods.is_empty() {
        let hint = "claims are prepared for a pod: add one, or compose one with --pod and --device";
        return Err(CommandError::usage("there is no Pod in the files", hint).into());
    }
    Ok(objects)
}

/// Reads a pod of the local API, which has its claims, after those of templates are made.
async fn from_local_api(location: &Location, namespace: &str, name: &str) -> Result<Objects> {
    let client = local_api::connect(location).await?;
    let pod = timeout(TEMPLATES_TIMEOUT, client.pod_with_claims(namespace, name)).await;
    let Ok(pod) = pod else {
        let without = client.claims_without_template(namespace, name).await?;
        bail!(not_made(namespace, name, &without));
    };
    let Some(pod) = pod? else {
        bail!(
            "there is no pod {namespace}/{name} in the local API: make it with `nodedock claim create -f`, or compose one with --device or --claim"
        );
    };
    let pods = vec![manifest::pod_of(pod)?];
    Ok(Objects {
        pods,
        ..Objects::default()
    })
}

/// Why a pod of the local API has no claims yet. `without`: its claims whose template is not there, each with the template.
fn not_made(namespace: &str, pod: &str, without: &[(String, String)]) -> String {
    let Some((claim, template)) = without.first() else {
        return format!(
            "claims of pod {namespace}/{pod} were not made from their templates in {} s: run the command again",
            TEMPLATES_TIMEOUT.as_secs()
        );
    };
    let more = match without.len() - 1 {
        0 => String::new(),
        more => format!(" ({more} more claims of the pod have none either)"),
    };
    format!(
        "claim {claim} of pod {namespace}/{pod} cannot be made: there is no ResourceClaimTemplate {namespace}/{template}{more}; make it with `nodedock claim create -f`, and run the command again"
    )
}

/// Returns the UID of a pod of which only the name is known: the same for each command.
fn pod_uid(namespace: &str, name: &str) -> Uid {
    uid(&format!("pod/{namespace}/{name}"))
}

/// Composes a pod with one claim for the devices. Names and UIDs are derived from the arguments, so that repeating the command repeats the
/// request, whether it names the pools with the node or without.
fn compose(
    namespace: &str,
    pod: &str,
    composed: &Composed,
    node: &str,
) -> Result<Objects, CommandError> {
    let devices = composed
        .devices
        .iter()
        .enumerate()
        .map(|(index, text)| {
            Ok(AllocatedDevice {
                consumed: composed.amounts.clone(),
                ..device(index, text)?
            })
        })
        .collect::<Result<Vec<_>, CommandError>>()?;
    let configs = composed.configs(&devices)?;
    let names: Vec<_> = devices
        .iter()
        .map(|d| format!("{}/{}/{}", d.driver, pool_of(d, node), d.device))
        .collect();
    let pod_uid = pod_uid(namespace, pod);
    let of_claim = format!("claim/{namespace}/{pod}/{}", names.join(","));
    let claim_uid = uid(&(of_claim + &composed.suffix()));
    let short: String = claim_uid.as_str().chars().take(8).collect();
    let namespace = ObjectName::new(namespace).map_err(bad_name)?;
    let pod = ObjectRef {
        namespace: namespace.clone(),
        name: ObjectName::new(pod).map_err(bad_name)?,
        uid: pod_uid,
    };
    let claim_name = ObjectName::new(format!("{}-{short}", pod.name)).map_err(bad_name)?;
    let claim = Claim {
        id: ObjectRef {
            namespace,
            name: claim_name.clone(),
            uid: claim_uid,
        },
        allocation: Some(Allocation {
            devices,
            configs,
            node_name: None,
        }),
        reserved_for: vec![Consumer::of_pod(&pod)],
        annotations: BTreeMap::new(),
        owner_pod: None,
        resource: None,
    };
    let uses = ContainerClaim {
        pod_claim_name: POD_CLAIM.to_owned(),
        request: None,
    };
    let request = PodRequest {
        pod,
        pod_group: None,
        claims: vec![ClaimReference {
            pod_claim_name: POD_CLAIM.to_owned(),
            claim_name,
            claim_uid: None,
        }],
        containers: vec![PodContainer {
            name: CONTAINER.to_owned(),
            claims: vec![uses],
            ..PodContainer::default()
        }],
    };
    Ok(Objects {
        claims: vec![claim],
        pods: vec![request],
        skipped: Vec::new(),
    })
}

fn bad_name(error: nodedock_model::NameError) -> CommandError {
    CommandError::usage(error.to_string(), NAME_HINT)
}

fn pool_of(of: &AllocatedDevice, node: &str) -> String {
    let pool = of.pool.as_str();
    match ObjectName::new(node) {
        Ok(node) => PoolNames { node }.local(pool).to_owned(),
        // No pool has such a name before its own.
        Err(_) => pool.to_owned(),
    }
}

/// Makes one request of all devices of each driver that is a device plugin. Such a plugin answers for the devices of a container together, often with one
/// variable that names all of them.
fn join_requests(claims: &mut [Claim], is_adapter: impl Fn(&DriverName) -> bool) {
    for allocation in claims
        .iter_mut()
        .filter_map(|claim| claim.allocation.as_mut())
    {
        let mut requests: BTreeMap<DriverName, String> = BTreeMap::new();
        for device in allocation
            .devices
            .iter_mut()
            .filter(|device| is_adapter(&device.driver))
        {
            let first = requests
                .entry(device.driver.clone())
                .or_insert_with(|| device.request.clone());
            device.request.clone_from(first);
        }
    }
}

const NAME_HINT: &str =
    "names of pods, claims and namespaces are lower-case letters, digits, '-' and '.'";

/// Composes a pod whose container has claims of the local API. Its UID is derived from its name, as that of a pod with devices.
fn compose_with(namespace: &str, pod: &str, claims: &[String]) -> Result<Objects, CommandError> {
    let pod_uid = pod_uid(namespace, pod);
    let namespace = ObjectName::new(namespace).map_err(bad_name)?;
    let pod = ObjectRef {
        namespace,
        name: ObjectName::new(pod).map_err(bad_name)?,
        uid: pod_uid,
    };
    let names = claims
        .iter()
        .map(ObjectName::new)
        .collect::<Result<Vec<_>, _>>()
        .map_err(bad_name)?;
    Ok(Objects {
        pods: vec![request_for(pod, names)],
        ..Objects::default()
    })
}

/// A pod of one container with all of these claims.
pub(super) fn request_for(pod: ObjectRef, claims: Vec<ObjectName>) -> PodRequest {
    let container = PodContainer {
        name: CONTAINER.to_owned(),
        claims: claims
            .iter()
            .map(|claim| ContainerClaim {
                pod_claim_name: claim.to_string(),
                request: None,
            })
            .collect(),
        ..PodContainer::default()
    };
    let claims = claims
        .into_iter()
        .map(|claim_name| ClaimReference {
            pod_claim_name: claim_name.to_string(),
            claim_name,
            claim_uid: None,
        })
        .collect();
    PodRequest {
        pod,
        pod_group: None,
        claims,
        containers: vec![container],
    }
}

/// Returns a name-based UUID (RFC 9562, version 5) in Nodedock's namespace.
fn uid(text: &str) -> Uid {
    let ours = Uuid::new_v5(&Uuid::NAMESPACE_DNS, b"nodedock.dev");
    Uid::new(Uuid::new_v5(&ours, text.as_bytes()).to_string())
        .expect("a UUID has digits, letters and dashes only")
}

/// Parses DRIVER/[NODE/]POOL/DEVICE. Names of pools may have slashes, those of drivers and devices may not.
fn device(index: usize, text: &str) -> Result<AllocatedDevice, CommandError> {
    let hint = "a device is named as DRIVER/POOL/DEVICE, and a pool as NODE/POOL, or POOL on this node; `nodedock get devices` lists them";
    let parts = text
        .split_once('/')
        .and_then(|(driver, rest)| Some((driver, rest.rsplit_once('/')?)));
    let Some((driver, (pool, device))) = parts else {
        return Err(CommandError::usage(
            format!("{text:?} is not the name of a device"),
            hint,
        ));
    };
    let named =
        |error: nodedock_model::NameError| CommandError::usage(format!("{text:?}: {error}"), hint);
    Ok(AllocatedDevice {
        request: format!("device-{index}"),
        driver: DriverName::new(driver).map_err(named)?,
        pool: PoolName::new(pool).map_err(named)?,
        device: DeviceName::new(device).map_err(named)?,
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(devices: &[&str]) -> Composed {
        Composed {
            devices: devices.iter().map(|&device| device.to_owned()).collect(),
            ..Composed::default()
        }
    }

    #[test]
    fn composed_claim_has_parameters_and_amounts() {
        let plain = of(&["d.dev/p/0"]);
        let composed = Composed {
            parameters: Some("{}".to_owned()),
            amounts: BTreeMap::from([("memory".to_owned(), "8Gi".to_owned())]),
            ..of(&["d.dev/p/0"])
        };
        let claim = |composed: &Composed| {
            let mut objects = compose("default", "demo", composed, "").unwrap();
            objects.claims.remove(0)
        };
        assert_ne!(claim(&plain).id, claim(&composed).id);
        let allocation = claim(&composed).allocation.unwrap();
        assert_eq!(allocation.devices[0].consumed, composed.amounts);
        assert_eq!(allocation.configs[0].driver.as_str(), "d.dev");
        assert_eq!(allocation.configs[0].parameters, "{}");
        let several = Composed {
            devices: of(&["d.dev/p/0", "e.dev/p/0"]).devices,
            ..composed
        };
        let error = compose("default", "demo", &several, "").unwrap_err();
        assert!(error.to_string().contains("d.dev and e.dev"), "{error}");
    }

    #[test]
    fn composed_claim_depends_on_its_devices() {
        let compose = |device: &str| compose("default", "demo", &of(&[device]), "node-1").unwrap();
        let (one, again, other) = (
            compose("d.dev/misc/fuse"),
            compose("d.dev/misc/fuse"),
            compose("d.dev/misc/kvm"),
        );
        assert_eq!((&one.claims, &one.pods), (&again.claims, &again.pods));
        assert_ne!(one.claims[0].id, other.claims[0].id);
        assert_eq!(one.pods[0].pod, other.pods[0].pod);
        let with_node = compose("d.dev/node-1/misc/fuse");
        assert_eq!(one.claims[0].id, with_node.claims[0].id);
        assert_ne!(
            one.claims[0].id,
            compose("d.dev/node-2/misc/fuse").claims[0].id
        );
    }

    /// Two Allocates for one container set its variable twice, and a runtime kept the last.
    #[test]
    fn device_plugin_devices_share_one_request() {
        let devices = of(&["a.dev/p/0", "b.dev/p/0", "a.dev/p/1", "b.dev/p/1"]);
        let mut claims = compose("default", "demo", &devices, "node-1")
            .unwrap()
            .claims;
        join_requests(&mut claims, |driver| driver.as_str() == "a.dev");
        let devices = claims.remove(0).allocation.unwrap().devices;
        let requests: Vec<_> = devices
            .iter()
            .map(|device| device.request.as_str())
            .collect();
        assert_eq!(requests, ["device-0", "device-1", "device-0", "device-3"]);
    }

    #[test]
    fn a_pool_may_have_slashes() {
        let device = device(0, "d.dev/rack-1/shelf-2/fuse").unwrap();
        assert_eq!(
            (device.pool.as_str(), device.device.as_str()),
            ("rack-1/shelf-2", "fuse")
        );
    }

    #[test]
    fn invalid_device_name_is_usage_error() {
        for bad in [
            "",
            "d.dev",
            "d.dev/misc",
            "d.dev/misc/",
            "d.dev/misc/FUSE",
            "../../x",
            "d.dev//misc/fuse",
            "d.dev/node-1//fuse",
            "d.dev//fuse",
            "/node-1/misc/fuse",
        ] {
            assert!(
                matches!(device(0, bad), Err(CommandError::Usage { .. })),
                "{bad:?}"
            );
        }
    }
}
