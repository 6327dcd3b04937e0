//! `nodedock get`.

mod node;
mod resources;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::{Args, ValueEnum};
use nodedock_proto::node::v1;
use serde::Serialize;
use serde_json::Value;

use super::client::{Client, connect, said};
use super::kubelet::Kubelet;
use super::output::{Format, Rows, print, say};
use super::{Outcome, Place};

#[derive(Args)]
pub(super) struct GetArgs {
    what: What,
    /// Only this one: a driver's, claim's or resource's name, POOL/DEVICE, or NAMESPACE/POD
    name: Option<String>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    /// Print again whenever something changes
    #[arg(short, long)]
    watch: bool,
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
    /// The node itself, and what is wrong with it
    Node,
}

impl What {
    fn singular(self) -> &'static str {
        match self {
            Self::Drivers => "driver",
            Self::Devices => "device",
            Self::Claims => "claim",
            Self::Pods => "pod",
            Self::Resources => "resource",
            Self::Node => "node",
        }
    }
}

pub(super) async fn run(place: Place, args: GetArgs) -> Result<Outcome> {
    let mut client = connect(&place).await?;
    // Listening begins before the list, so that no change falls between them.
    let mut events = if args.watch {
        Some(client.watch(v1::WatchRequest {}).await.map_err(said(&place))?.into_inner())
    } else {
        None
    };
    let mut found = show(&mut client, &place, &args).await?;
    if !matches!(args.what, What::Node) {
        node::warn(&mut client).await;
    }
    if let Some(events) = &mut events {
        while events.message().await.map_err(said(&place))?.is_some() {
            say("")?;
            found = show(&mut client, &place, &args).await?;
        }
    }
    match args.name {
        Some(name) if !found => Err(no_such(args.what.singular(), &name)),
        _ => Ok(Outcome::Done),
    }
}

/// Prints, and says whether there was anything.
async fn show(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    match args.what {
        What::Drivers => drivers(client, place, args).await,
        What::Devices => devices(client, place, args).await,
        What::Claims => claims(client, place, args).await,
        What::Pods => pods(client, place, args).await,
        What::Resources => resources::show(client, place, args).await,
        What::Node => node::show(client, place, args).await,
    }
}

/// A reference in JSON.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Ref {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

impl From<v1::ObjectRef> for Ref {
    fn from(object: v1::ObjectRef) -> Self {
        Self { namespace: object.namespace, name: object.name, uid: object.uid }
    }
}

pub(super) fn joined(objects: &[Ref]) -> String {
    let names: Vec<_> =
        objects.iter().map(|object| format!("{}/{}", object.namespace, object.name)).collect();
    names.join(",")
}

#[derive(Serialize)]
struct Driver {
    name: Option<String>,
    kind: String,
    source: String,
    version: String,
    state: String,
    reason: String,
    digest: String,
    devices: u32,
    /// None: nothing is checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    trust: Option<Trust>,
    /// Of a native plugin, in tables only.
    #[serde(skip)]
    connection: Option<String>,
    #[serde(skip)]
    endpoint: Option<String>,
}

/// Whether a driver's file is trusted.
#[derive(Serialize)]
struct Trust {
    mode: String,
    verdict: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pin: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
}

impl From<v1::DriverTrust> for Trust {
    fn from(trust: v1::DriverTrust) -> Self {
        let v1::DriverTrust { mode, verdict, key, pin, reason } = trust;
        Self { mode, verdict, key, pin, reason }
    }
}

fn driver(driver: v1::Driver) -> Driver {
    let warned = driver.trust.as_ref().filter(|trust| trust.mode == "warn" && !trust.reason.is_empty());
    let warned = warned.map(|trust| format!("not trusted: {}", trust.reason));
    let problem = driver.problem.map(|problem| problem.message).or(warned).unwrap_or_default();
    Driver {
        name: Some(driver.name).filter(|name| !name.is_empty()),
        kind: driver.kind,
        source: driver.source,
        version: driver.version,
        state: driver.state,
        reason: if driver.reason.is_empty() { problem } else { driver.reason },
        digest: driver.digest,
        devices: driver.devices,
        trust: driver.trust.filter(|trust| trust.mode != "off").map(Into::into),
        connection: driver.native.as_ref().map(|native| native.connection.clone()),
        endpoint: driver.native.map(|native| native.endpoint),
    }
}

async fn drivers(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    let name = args.name.clone().unwrap_or_default();
    let answer = client.list_drivers(v1::ListDriversRequest { name }).await.map_err(said(place))?;
    let drivers: Vec<_> = answer.into_inner().drivers.into_iter().map(driver).collect();
    let row = |driver: &Driver| {
        let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        vec![
            or_dash(driver.name.as_deref().unwrap_or_default()),
            driver.kind.clone(),
            or_dash(&driver.version),
            driver.state.clone(),
            driver.devices.to_string(),
            driver.source.clone(),
            driver.reason.clone(),
            or_dash(&driver.digest),
            or_dash(driver.connection.as_deref().unwrap_or_default()),
            or_dash(driver.endpoint.as_deref().unwrap_or_default()),
        ]
    };
    let rows = || Rows {
        heading: vec![
            "NAME",
            "KIND",
            "VERSION",
            "STATE",
            "DEVICES",
            "SOURCE",
            "REASON",
            "DIGEST",
            "CONNECTION",
            "ENDPOINT",
        ],
        wide_from: 7,
        rows: drivers.iter().map(row).collect(),
    };
    print(
        args.output,
        &drivers,
        rows,
        "no drivers: put a .wasm file into the drivers folder, or start a native plugin",
    )?;
    Ok(!drivers.is_empty())
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    driver: String,
    pool: String,
    name: String,
    attributes: Value,
    capacity: BTreeMap<String, String>,
    health: String,
    claims: Vec<Ref>,
    #[serde(skip_serializing_if = "String::is_empty")]
    extended_resource: String,
    /// Of an extended resource's device; others have attributes that say it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    numa_nodes: Vec<u32>,
    /// That have it under the resource's name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pods: Vec<Ref>,
}

fn device(device: v1::Device) -> Device {
    let numa_nodes = if device.extended_resource.is_empty() { Vec::new() } else { device.numa_nodes };
    Device {
        driver: device.driver,
        pool: device.pool,
        name: device.name,
        attributes: serde_json::from_str(&device.attributes_json).unwrap_or_default(),
        capacity: device.capacity,
        health: device.health,
        claims: device.claims.into_iter().map(Into::into).collect(),
        extended_resource: device.extended_resource,
        numa_nodes,
        pods: device.pods.into_iter().map(Into::into).collect(),
    }
}

async fn devices(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    let request = v1::ListDevicesRequest { driver: String::new() };
    let answer = client.list_devices(request).await.map_err(said(place))?.into_inner();
    let named = |device: &Device| match &args.name {
        None => true,
        Some(name) => {
            let (driver, pool, resource) = (&device.driver, &device.pool, &device.extended_resource);
            let device = &device.name;
            [device.clone(), format!("{pool}/{device}"), format!("{driver}/{pool}/{device}")].contains(name)
                || [driver, resource].contains(&name)
        }
    };
    let devices: Vec<_> = answer.devices.into_iter().map(device).filter(named).collect();
    let row = |device: &Device| {
        let attributes = device.attributes.as_object().into_iter().flatten();
        let attributes: Vec<_> = attributes.map(|(name, value)| format!("{name}={}", plain(value))).collect();
        let capacity: Vec<_> =
            device.capacity.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let numa_nodes: Vec<_> = device.numa_nodes.iter().map(ToString::to_string).collect();
        vec![
            device.driver.clone(),
            device.pool.clone(),
            device.name.clone(),
            device.health.clone(),
            joined(&device.claims),
            joined(&device.pods),
            device.extended_resource.clone(),
            numa_nodes.join(","),
            capacity.join(","),
            attributes.join(","),
        ]
    };
    let rows = || Rows {
        heading: vec![
            "DRIVER",
            "POOL",
            "NAME",
            "HEALTH",
            "CLAIMS",
            "PODS",
            "RESOURCE",
            "NUMA",
            "CAPACITY",
            "ATTRIBUTES",
        ],
        wide_from: 7,
        rows: devices.iter().map(row).collect(),
    };
    print(args.output, &devices, rows, "no devices")?;
    Ok(!devices.is_empty())
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Claim {
    namespace: String,
    name: String,
    uid: String,
    state: String,
    pods: Vec<Ref>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kubelet: Option<Kubelet>,
    drivers: Vec<ClaimDriver>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ClaimDriver {
    driver: String,
    devices: Vec<String>,
    cdi_devices: Vec<String>,
}

fn claim(claim: v1::ClaimStatus) -> Claim {
    let id = claim.id.unwrap_or_default();
    let driver = |driver: v1::ClaimDriver| ClaimDriver {
        driver: driver.driver,
        devices: driver.devices,
        cdi_devices: driver.cdi_devices,
    };
    Claim {
        namespace: id.namespace,
        name: id.name,
        uid: id.uid,
        state: claim.state,
        pods: claim.pods.into_iter().map(Into::into).collect(),
        kubelet: claim.kubelet.map(Into::into),
        drivers: claim.drivers.into_iter().map(driver).collect(),
        problem: claim.problem.map(|problem| problem.message),
    }
}

/// The pods that hold it, or those for which a kubelet does.
fn held_by(claim: &Claim) -> String {
    let pods = Some(joined(&claim.pods)).filter(|pods| !pods.is_empty());
    let kubelet = claim.kubelet.as_ref().map(Kubelet::brief);
    pods.into_iter().chain(kubelet).collect::<Vec<_>>().join(",")
}

/// A name with or without its namespace.
pub(super) fn split(name: &str) -> (String, String) {
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    (namespace.to_owned(), name.to_owned())
}

async fn claims(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    let (namespace, name) = split(args.name.as_deref().unwrap_or_default());
    let request = v1::ListClaimsRequest { namespace, name, with_timeline: false };
    let answer = client.list_claims(request).await.map_err(said(place))?.into_inner();
    let claims: Vec<_> = answer.claims.into_iter().map(claim).collect();
    let row = |claim: &Claim| {
        let devices = |d: &ClaimDriver| {
            d.devices.iter().map(|device| format!("{}/{device}", d.driver)).collect::<Vec<_>>()
        };
        let devices: Vec<_> = claim.drivers.iter().flat_map(devices).collect();
        let cdi: Vec<_> = claim.drivers.iter().flat_map(|d| d.cdi_devices.clone()).collect();
        vec![
            claim.namespace.clone(),
            claim.name.clone(),
            claim.state.clone(),
            held_by(claim),
            devices.join(","),
            claim.problem.clone().unwrap_or_default(),
            claim.uid.clone(),
            cdi.join(","),
        ]
    };
    let rows = || Rows {
        heading: vec!["NAMESPACE", "NAME", "STATE", "PODS", "DEVICES", "PROBLEM", "UID", "CDI DEVICES"],
        wide_from: 6,
        rows: claims.iter().map(row).collect(),
    };
    print(args.output, &claims, rows, "no claims")?;
    Ok(!claims.is_empty())
}

#[derive(Serialize)]
struct Pod {
    namespace: String,
    name: String,
    uid: String,
    state: String,
    claims: Vec<Ref>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    resources: Vec<super::pods::ResourceOutcome>,
    containers: Vec<super::pods::Container>,
}

async fn pods(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    let answer = client.list_pods(v1::ListPodsRequest {}).await.map_err(said(place))?.into_inner();
    let pod = |status: v1::PodStatus| {
        let id = status.pod.unwrap_or_default();
        Pod {
            namespace: id.namespace,
            name: id.name,
            uid: id.uid,
            state: status.state,
            claims: status.claims.into_iter().map(Into::into).collect(),
            resources: status.resources.into_iter().map(Into::into).collect(),
            containers: status.containers.into_iter().map(Into::into).collect(),
        }
    };
    let (namespace, name) = split(args.name.as_deref().unwrap_or_default());
    let named = |pod: &Pod| {
        (name.is_empty() || pod.name == name || pod.uid == name)
            && (namespace.is_empty() || pod.namespace == namespace)
    };
    let pods: Vec<_> = answer.pods.into_iter().map(pod).filter(named).collect();
    let row = |pod: &Pod| {
        let cdi: Vec<_> = pod.containers.iter().flat_map(|container| container.cdi_devices.clone()).collect();
        vec![
            pod.namespace.clone(),
            pod.name.clone(),
            pod.state.clone(),
            joined(&pod.claims),
            resources::summary(&pod.resources),
            pod.uid.clone(),
            cdi.join(","),
        ]
    };
    let rows = || Rows {
        heading: vec!["NAMESPACE", "NAME", "STATE", "CLAIMS", "RESOURCES", "UID", "CDI DEVICES"],
        wide_from: 6,
        rows: pods.iter().map(row).collect(),
    };
    print(args.output, &pods, rows, "no pods")?;
    Ok(!pods.is_empty())
}

/// An error for a name that is not there.
pub(super) fn no_such(kind: &str, name: &str) -> anyhow::Error {
    if kind == What::Node.singular() {
        return anyhow::anyhow!("this is not the node {name:?}; `nodedock get node` tells which it is");
    }
    anyhow::anyhow!("there is no {kind} {name:?}; `nodedock get {kind}s` lists them")
}
