//! `nodedock get`: lists of what the daemon has, and the node itself.

mod tables;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use nodedock_proto::node::v1;
use serde::Serialize;
use serde_json::{Value, json};

use super::client::{Client, connect};
use super::local_api::text;
use super::output::{Format, Row, join, joined, print, print_error, print_text, table};
use super::{CommandError, Location, claim, completion, describe, local_api, names};
use nodedock_kube::client::{ClientConfig, KubeClient, RequestRate};
use nodedock_kube::extended_resources::{Applied, apply_class, class_name, manifest};
use nodedock_model::{DriverName, ExtendedResource, ObjectName, PoolNames, limit};

#[derive(Args)]
pub(super) struct GetArgs {
    what: What,
    /// Only this one: a driver's, claim's or resource's name, [NODE/]POOL/DEVICE, or NAMESPACE/POD
    #[arg(add = completion::candidates_of_get())]
    name: Option<String>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    /// Print again whenever something changes
    #[arg(short, long)]
    watch: bool,
    /// Claims that were unprepared within the last day, the oldest first; `explain claim` has the history of each
    #[arg(long)]
    ended: bool,
    /// Create the DeviceClasses of classmanifests in the cluster, with the rights of --kubeconfig; one that is there is not changed
    #[arg(long, requires = "kubeconfig", conflicts_with = "watch")]
    apply: bool,
    /// The kubeconfig for --apply
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    #[value(alias = "driver")]
    Drivers,
    #[value(alias = "device")]
    Devices,
    #[value(alias = "claim")]
    Claims,
    #[value(alias = "pod")]
    Pods,
    /// Extended resources: of device plugins, and of pools that carry a resource's name
    #[value(alias = "resource")]
    Resources,
    /// DeviceClasses in the local API
    #[value(alias = "deviceclass")]
    Deviceclasses,
    /// Manifests of DeviceClasses for the extended resources of drivers, for `kubectl apply -f -` with -o yaml
    #[value(alias = "classmanifest")]
    Classmanifests,
    /// ResourceSlices of all drivers in the local API
    #[value(alias = "slice")]
    Slices,
    /// Device plugins that are DRA drivers
    #[value(alias = "adapter")]
    Adapters,
    /// The node itself, and its problems
    Node,
}

impl What {
    fn singular(self) -> String {
        let value = self.to_possible_value();
        let name = value
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default();
        match self {
            Self::Deviceclasses => "deviceclass".to_owned(),
            _ => name.trim_end_matches('s').to_owned(),
        }
    }
}

/// The DeviceClass of an extended resource.
struct ClassOfResource {
    resource: ExtendedResource,
    driver: DriverName,
    mechanism: String,
}

impl ClassOfResource {
    /// None: the resource is of a native device plugin, which no class selects, or has no driver now.
    fn of(resource: &v1::Resource) -> Option<Self> {
        let (name, driver) = (
            ExtendedResource::new(&resource.name),
            DriverName::new(&resource.driver),
        );
        Some(Self {
            resource: name.ok()?,
            driver: driver.ok()?,
            mechanism: resource.mechanism.clone(),
        })
    }
}

/// A claim as `get claims -o` prints it; `explain claim` has the whole of it.
#[derive(Serialize)]
struct ClaimSummary<'a> {
    #[serde(flatten)]
    id: &'a Option<v1::ObjectRef>,
    state: &'a str,
    pods: &'a [v1::ObjectRef],
    #[serde(skip_serializing_if = "Option::is_none")]
    kubelet: Option<&'a v1::KubeletHold>,
    drivers: Vec<ClaimDriverSummary<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ClaimDriverSummary<'a> {
    driver: &'a str,
    devices: &'a [String],
    /// Those of them that the driver does not have any more.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    gone_devices: &'a [String],
    cdi_devices: &'a [String],
}

pub(super) async fn run(location: &Location, args: GetArgs) -> Result<()> {
    if args.apply && !matches!(args.what, What::Classmanifests) {
        let message = "--apply is of classmanifests alone";
        return Err(CommandError::usage(
            message,
            "nodedock get classmanifests --apply --kubeconfig FILE",
        )
        .into());
    }
    if args.ended && !matches!(args.what, What::Claims) {
        let message = "--ended is of claims alone";
        return Err(CommandError::usage(message, "nodedock get claims --ended").into());
    }
    match args.what {
        What::Slices => return slices(location, &args).await,
        What::Deviceclasses => return device_classes(location, &args).await,
        _ => {}
    }
    let mut client = connect(location).await?;
    // The watch begins before the list, so that no change falls between them.
    let mut events = match args.watch {
        true => Some(client.watch(v1::WatchRequest {}).await?.into_inner()),
        false => None,
    };
    let mut found = show(location, &mut client, &args).await?;
    if !matches!(args.what, What::Node) {
        warn_of_problems(&mut client).await;
    }
    while let Some(events) = &mut events
        && events.message().await?.is_some()
    {
        print_text("")?;
        found = show(location, &mut client, &args).await?;
    }
    match args.name {
        Some(name) if !found => Err(names::unknown(&args.what.singular(), &name)),
        _ => Ok(()),
    }
}

/// Prints, and returns whether there was anything.
async fn show(location: &Location, client: &mut Client, args: &GetArgs) -> Result<bool> {
    let (format, name) = (args.output, args.name.clone().unwrap_or_default());
    match args.what {
        What::Drivers => {
            let answer = client
                .list_drivers(v1::ListDriversRequest { name })
                .await?
                .into_inner();
            let drivers: Vec<_> = answer.drivers.into_iter().map(with_reason).collect();
            let none =
                "no drivers: put a .wasm file into the drivers directory, or start a native plugin";
            list(format, &drivers, none)
        }
        What::Devices => {
            let request = v1::ListDevicesRequest {
                driver: String::new(),
            };
            let answer = client.list_devices(request).await?.into_inner();
            let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
            let names = PoolNames {
                node: ObjectName::new(&node.name)?,
            };
            let devices = answer
                .devices
                .into_iter()
                .filter(|device| is_device(device, &name, &names));
            let devices: Vec<_> = devices.collect();
            if devices.is_empty() && !name.is_empty() {
                return show_no_devices(client, format, &name).await;
            }
            list(format, &devices, "no devices")
        }
        What::Claims if args.ended => {
            let answer = client
                .list_claims(names::claims_and_ended(&name, false))
                .await?
                .into_inner();
            let none = "no claims were unprepared within the last day";
            list(format, &answer.ended, none)
        }
        What::Claims => {
            let mut claims = client
                .list_claims(names::claims(&name, false))
                .await?
                .into_inner()
                .claims;
            let objects = local_api::claims(location).await?;
            add_objects(&mut claims, &objects, &name);
            let summaries: Vec<_> = claims.iter().map(summary).collect();
            print(format, &summaries, || table(format, &claims, "no claims"))?;
            Ok(!claims.is_empty())
        }
        What::Pods => {
            let answer = client.list_pods(v1::ListPodsRequest {}).await?.into_inner();
            let pods: Vec<_> = answer
                .pods
                .into_iter()
                .filter(|pod| is_pod(pod, &name))
                .collect();
            list(format, &pods, "no pods")
        }
        What::Resources => {
            let answer = client
                .get_capacity(v1::GetCapacityRequest {})
                .await?
                .into_inner();
            let resources: Vec<_> = resources(answer)
                .into_iter()
                .filter(|resource| name.is_empty() || resource.name == name)
                .collect();
            list(format, &resources, "no extended resources")
        }
        What::Classmanifests => {
            let answer = client
                .get_capacity(v1::GetCapacityRequest {})
                .await?
                .into_inner();
            let classes: Vec<_> = answer
                .resources
                .iter()
                .filter_map(ClassOfResource::of)
                .collect();
            let classes: Vec<_> = classes
                .into_iter()
                .filter(|class| {
                    name.is_empty()
                        || class_name(&class.resource) == name
                        || class.resource.as_str() == name
                })
                .collect();
            if let (true, Some(kubeconfig)) = (args.apply, &args.kubeconfig) {
                apply(&classes, kubeconfig).await?;
                return Ok(!classes.is_empty());
            }
            let none = "no extended resources of drivers, so no DeviceClasses";
            print(format, &class_list(&classes), || {
                table(format, &classes, none)
            })?;
            Ok(!classes.is_empty())
        }
        // Of another API.
        What::Slices | What::Deviceclasses => Ok(true),
        What::Adapters => {
            let answer = client
                .list_adapters(v1::ListAdaptersRequest {})
                .await?
                .into_inner();
            let adapters: Vec<_> = answer
                .adapters
                .into_iter()
                .filter(|adapter| {
                    name.is_empty() || adapter.driver == name || adapter.resource == name
                })
                .collect();
            list(format, &adapters, "no adapters of device plugins")
        }
        What::Node => {
            let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
            if !name.is_empty() && name != node.name {
                return Ok(false);
            }
            print(format, &node, || {
                let conditions = table(format, &node.conditions, "the node has no problems");
                format!(
                    "{}\n\n{conditions}",
                    table(format, std::slice::from_ref(&node), "")
                )
            })
            .map(|()| true)
        }
    }
}

/// Adds the claims of the local API that are not prepared, as far as they have the name or the UID; an empty name is every claim.
pub(super) fn add_objects(claims: &mut Vec<v1::ClaimStatus>, objects: &[Value], wanted: &str) {
    let (namespace, name) = names::split(wanted);
    let is_wanted = |id: &v1::ObjectRef| {
        (namespace.is_empty() || id.namespace == namespace)
            && (name.is_empty() || id.name == name || id.uid == name)
    };
    for status in objects.iter().map(claim::as_status) {
        let is_new = status.id.as_ref().is_some_and(|id| {
            let uids = claims.iter().filter_map(|known| known.id.as_ref());
            is_wanted(id) && !uids.into_iter().any(|known| known.uid == id.uid)
        });
        if is_new {
            claims.push(status);
        }
    }
}

/// Prints that a driver has no devices, and returns whether there is a driver of this name.
async fn show_no_devices(client: &mut Client, format: Format, name: &str) -> Result<bool> {
    let request = v1::ListDriversRequest {
        name: name.to_owned(),
    };
    let drivers = client.list_drivers(request).await?.into_inner().drivers;
    let none: [v1::Device; 0] = [];
    let states = drivers.into_iter().map(with_reason).map(|driver| {
        let reason = match driver.reason.as_str() {
            "" => String::new(),
            reason => format!(": {reason}"),
        };
        format!(
            "driver {name} has no devices; it is {}{reason}",
            driver.state
        )
    });
    let states: Vec<_> = states.collect();
    if states.is_empty() {
        return list(format, &none, "no devices");
    }
    print(format, &none, || join(states))?;
    Ok(true)
}

/// A slice, as a row.
struct Slice(Value);

impl Row for Slice {
    const COLUMNS: &'static [super::output::Column<Self>] = &[
        ("NAME", |slice| text(&slice.0, "/metadata/name").to_owned()),
        ("DRIVER", |slice| text(&slice.0, "/spec/driver").to_owned()),
        ("POOL", |slice| text(&slice.0, "/spec/pool/name").to_owned()),
        ("DEVICES", |slice| {
            slice.0["spec"]["devices"]
                .as_array()
                .map_or(0, Vec::len)
                .to_string()
        }),
        ("GENERATION", |slice| {
            slice.0["spec"]["pool"]["generation"].to_string()
        }),
    ];
    const NARROW: usize = 4;
}

/// A DeviceClass, as a row.
struct Class(Value);

impl Row for Class {
    const COLUMNS: &'static [super::output::Column<Self>] = &[
        ("NAME", |class| text(&class.0, "/metadata/name").to_owned()),
        ("RESOURCE", |class| {
            tables::or_dash(text(&class.0, "/spec/extendedResourceName"))
        }),
        ("AGE", |class| {
            nodedock_apiserver::age(&class.0["metadata"]["creationTimestamp"])
        }),
        ("SELECTORS", |class| {
            let selectors = class.0["spec"]["selectors"].as_array();
            let selectors = selectors.into_iter().flatten();
            joined(selectors.map(|selector| text(selector, "/cel/expression")))
        }),
    ];
    const NARROW: usize = 3;
}

/// Refuses to watch what is listed by the local API.
fn refuse_watch(args: &GetArgs, what: &str, resource: &str) -> Result<()> {
    if !args.watch {
        return Ok(());
    }
    let hint = format!("kubectl get {resource} --watch, with `nodedock kubeconfig`");
    Err(CommandError::usage(format!("{what} are listed, not watched"), hint).into())
}

/// Prints the DeviceClasses as kubectl does: one as it is, and several as a list.
async fn device_classes(location: &Location, args: &GetArgs) -> Result<()> {
    refuse_watch(args, "DeviceClasses", "deviceclasses")?;
    let classes = local_api::connect(location).await?.device_classes().await?;
    let (whole, classes) = match &args.name {
        None => (local_api::as_kubectl(&classes, false), classes),
        Some(name) => {
            let found = classes
                .into_iter()
                .find(|class| text(class, "/metadata/name") == name);
            let found = found.ok_or_else(|| names::unknown(&args.what.singular(), name))?;
            let found = vec![found];
            (local_api::as_kubectl(&found, true), found)
        }
    };
    let rows: Vec<_> = classes.into_iter().map(Class).collect();
    print(args.output, &whole, || {
        table(args.output, &rows, "no DeviceClasses")
    })
}

async fn slices(location: &Location, args: &GetArgs) -> Result<()> {
    refuse_watch(args, "slices", "resourceslices")?;
    let name = args.name.clone().unwrap_or_default();
    let listed = local_api::connect(location).await?.slices().await?;
    let listed: Vec<_> = listed
        .into_iter()
        .filter(|slice| {
            name.is_empty()
                || ["/metadata/name", "/spec/driver", "/spec/pool/name"]
                    .iter()
                    .any(|at| text(slice, at) == name)
        })
        .collect();
    let rows: Vec<_> = listed.iter().cloned().map(Slice).collect();
    let whole = local_api::as_kubectl(&listed, false);
    print(args.output, &whole, || {
        table(args.output, &rows, "no slices")
    })?;
    match args.name.as_deref().filter(|_| listed.is_empty()) {
        Some(name) => Err(names::unknown(&args.what.singular(), name)),
        None => Ok(()),
    }
}

/// Creates classes, and prints what became of each.
async fn apply(classes: &[ClassOfResource], kubeconfig: &Path) -> Result<()> {
    let rate = RequestRate {
        per_second: limit::API_PER_SECOND,
        burst: limit::API_BURST,
    };
    let config = ClientConfig {
        rate,
        kubeconfig: Some(kubeconfig.to_owned()),
    };
    let client = KubeClient::connect(config)
        .await
        .context("connect to the API server")?;
    let mut is_done = true;
    for ClassOfResource {
        resource, driver, ..
    } in classes
    {
        let applied = apply_class(&client, resource, driver).await;
        let applied = applied.with_context(|| format!("create the DeviceClass of {resource}"))?;
        let name = class_name(resource);
        is_done &= matches!(applied, Applied::Created | Applied::Unchanged);
        print_text(&match applied {
            Applied::Created => format!("deviceclass {name} created"),
            Applied::WithoutResource => format!(
                "deviceclass {name} created, and the API server dropped its spec.extendedResourceName"
            ),
            Applied::Unchanged => format!("deviceclass {name} unchanged"),
            Applied::Differs => format!(
                "deviceclass {name} is another one, and stays as it is: compare it with nodedock get classmanifests {name} -o yaml"
            ),
        })?;
    }
    CommandError::unless_done(is_done)
}

/// A list as `kubectl apply -f -` reads it.
fn class_list(classes: &[ClassOfResource]) -> Value {
    let items: Vec<_> = classes
        .iter()
        .map(|class| manifest(&class.resource, &class.driver))
        .collect();
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

fn list<R: Row + Serialize>(format: Format, rows: &[R], none: &str) -> Result<bool> {
    print(format, &rows, || table(format, rows, none))?;
    Ok(!rows.is_empty())
}

fn summary(claim: &v1::ClaimStatus) -> ClaimSummary<'_> {
    let v1::ClaimStatus {
        id,
        state,
        pods,
        kubelet,
        ..
    } = claim;
    let kubelet = kubelet.as_ref();
    let drivers = claim.drivers.iter().map(driver_summary).collect();
    let problem = claim
        .problem
        .as_ref()
        .map(|problem| problem.message.as_str());
    ClaimSummary {
        id,
        state: describe::claim_state(state, claim.stale_boot),
        pods,
        kubelet,
        drivers,
        problem,
    }
}

fn driver_summary(of: &v1::ClaimDriver) -> ClaimDriverSummary<'_> {
    ClaimDriverSummary {
        driver: &of.driver,
        devices: &of.devices,
        gone_devices: &of.gone_devices,
        cdi_devices: &of.cdi_devices,
    }
}

/// Fills in the reason where the driver's problem, or a warning of its trust, says why it is in its state.
fn with_reason(mut driver: v1::Driver) -> v1::Driver {
    if driver.reason.is_empty() {
        let warned = driver
            .trust
            .as_ref()
            .filter(|trust| trust.mode == "warn" && !trust.reason.is_empty());
        let warned = warned.map(|trust| format!("not trusted: {}", trust.reason));
        let problem = driver
            .problem
            .as_ref()
            .map(|problem| problem.message.clone());
        driver.reason = problem.or(warned).unwrap_or_default();
    }
    driver
}

/// Returns whether a device has this name, alone or behind its pool and driver, or is one of this pool, driver or resource. The pool may be
/// named with or without the name of the node.
fn is_device(device: &v1::Device, wanted: &str, names: &PoolNames) -> bool {
    let v1::Device {
        driver,
        pool,
        name,
        extended_resource,
        ..
    } = device;
    wanted.is_empty()
        || [driver, extended_resource, name]
            .into_iter()
            .any(|text| text == wanted)
        || [pool.as_str(), names.local(pool)].into_iter().any(|pool| {
            let device = format!("{pool}/{name}");
            [pool, &device, &format!("{driver}/{device}")].contains(&wanted)
        })
}

fn is_pod(status: &v1::PodStatus, wanted: &str) -> bool {
    let (namespace, name) = names::split(wanted);
    let pod = status.pod.clone().unwrap_or_default();
    (name.is_empty() || pod.name == name || pod.uid == name)
        && (namespace.is_empty() || pod.namespace == namespace)
}

/// Every resource by its name; one that was removed since the daemon's start has no devices, as on a node.
fn resources(answer: v1::GetCapacityResponse) -> Vec<v1::Resource> {
    let removed = answer.removed.into_iter().map(|name| v1::Resource {
        name,
        ..v1::Resource::default()
    });
    let mut resources: Vec<_> = answer.resources.into_iter().chain(removed).collect();
    resources.sort_by(|a, b| a.name.cmp(&b.name));
    resources
}

/// Writes one line to standard error if the node has problems; a node that does not answer has no warning.
async fn warn_of_problems(client: &mut Client) {
    let Ok(node) = client.get_node(v1::GetNodeRequest {}).await else {
        return;
    };
    let conditions = node.into_inner().conditions.len();
    if conditions > 0 {
        let problems = describe::count(conditions as u64, "problem");
        print_error(&format!(
            "warning: the node has {problems}: see nodedock get node"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_resources_are_listed_without_devices() {
        let there = v1::Resource {
            name: "b.dev/b".to_owned(),
            capacity: 3,
            allocatable: 2,
            allocated: 1,
            active: true,
            driver: "d".to_owned(),
            numa_nodes: vec![0, 1],
            mechanism: "dra".to_owned(),
            mechanism_reason: "of the test".to_owned(),
        };
        let answer = v1::GetCapacityResponse {
            resources: vec![there],
            removed: vec!["a.dev/a".to_owned()],
        };
        let resources = resources(answer);
        let expected = serde_json::json!([
            {"name": "a.dev/a", "capacity": 0, "allocatable": 0, "allocated": 0, "active": false, "driver": ""},
            {"name": "b.dev/b", "capacity": 3, "allocatable": 2, "allocated": 1, "active": true, "driver": "d",
             "mechanism": "dra", "mechanismReason": "of the test"},
        ]);
        assert_eq!(serde_json::to_value(&resources).unwrap(), expected);
        let cells = |of: &v1::Resource| {
            Vec::from_iter(v1::Resource::COLUMNS.iter().map(|(_, cell)| cell(of)))
        };
        assert_eq!(
            cells(&resources[0]),
            ["a.dev/a", "0", "0", "0", "false", "-", "-", "", ""]
        );
        assert_eq!(
            cells(&resources[1]),
            [
                "b.dev/b",
                "3",
                "2",
                "1",
                "true",
                "d",
                "dra",
                "0,1",
                "of the test"
            ]
        );
    }

    #[test]
    fn claims_without_devices_are_listed() {
        let object = |namespace: &str, name: &str, uid: &str| json!({ "metadata": { "namespace": namespace, "name": name, "uid": uid } });
        let objects = [
            object("a", "one", "1"),
            object("a", "two", "2"),
            object("b", "two", "3"),
        ];
        let listed = |wanted: &str| {
            let mut prepared = claim::as_status(&objects[0]);
            prepared.state = "prepared".to_owned();
            let mut claims = vec![prepared];
            add_objects(&mut claims, &objects, wanted);
            let rows = claims
                .into_iter()
                .map(|claim| (claim.id.unwrap().uid, claim.state));
            rows.collect::<Vec<_>>()
        };
        let of = |uid: &str, state: &str| (uid.to_owned(), state.to_owned());
        let first = of("1", "prepared");
        let all = [first.clone(), of("2", "pending"), of("3", "pending")];
        assert_eq!(listed(""), all);
        assert_eq!(listed("b/two"), [first.clone(), of("3", "pending")]);
        assert_eq!(listed("2"), [first, of("2", "pending")]);
    }

    #[test]
    fn device_class_row_names_resource() {
        let cells = |class: Value| {
            let class = Class(class);
            let cells = Class::COLUMNS.iter().map(|(_, cell)| cell(&class));
            cells.collect::<Vec<_>>()
        };
        let selectors = ["a", "b"].map(|text| json!({ "cel": { "expression": text } }));
        let full = json!({ "metadata": { "name": "gpu", "creationTimestamp": "2000-01-01T00:00:00Z" },
            "spec": { "extendedResourceName": "a.dev/gpu", "selectors": selectors } });
        let full = cells(full);
        assert_eq!([&full[0], &full[1], &full[3]], ["gpu", "a.dev/gpu", "a,b"]);
        assert!(full[2].ends_with('y'), "{full:?}");
        let bare = cells(json!({ "metadata": { "name": "any" }, "spec": {} }));
        assert_eq!(bare, ["any", "-", "<unknown>", ""]);
    }

    #[test]
    fn every_listed_object_is_completed() {
        for what in What::value_variants() {
            let value = what.to_possible_value().unwrap();
            for word in value.get_name_and_aliases() {
                assert!(completion::Named::of_word(word).is_some(), "{word}");
            }
        }
    }

    #[test]
    fn class_list_covers_resources_of_drivers() {
        let resource = |name: &str, driver: &str| v1::Resource {
            name: name.to_owned(),
            driver: driver.to_owned(),
            ..v1::Resource::default()
        };
        let resources = [
            resource("a.dev/gpu", "gpu.a.dev"),
            resource("b.dev/nic", "/var/lib/kubelet/device-plugins/nic.sock"),
            resource("c.dev/gone", ""),
        ];
        let classes: Vec<_> = resources.iter().filter_map(ClassOfResource::of).collect();
        let list = class_list(&classes);
        assert_eq!(
            (&list["apiVersion"], &list["kind"]),
            (&json!("v1"), &json!("List"))
        );
        let [class] = list["items"].as_array().unwrap().as_slice() else {
            panic!("{list:#}")
        };
        assert_eq!(
            (&class["kind"], &class["metadata"]["name"]),
            (&json!("DeviceClass"), &json!("a.dev-gpu"))
        );
        assert_eq!(class["spec"]["extendedResourceName"], "a.dev/gpu");
    }
}
