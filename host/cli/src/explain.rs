//! `nodedock explain`: the state of a claim, a driver, an extended resource or a device, its problems, what happens next, and its history.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use clap::Subcommand;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::adapter::waits;
use super::client::{Client, connect};
use super::completion::Named;
use super::get::add_objects;
use super::output::{Format, join, print, print_text};
use super::{Location, describe, local_api, names, waiting};
use nodedock_base::clock::{now_ms, rfc3339};
use nodedock_base::printable::one_line;
use nodedock_kube::extended_resources::class_name;
use nodedock_model::limit::LABEL_VALUE_BYTES_MAX;
use nodedock_model::{DriverName, ExtendedResource};

#[derive(Subcommand)]
pub(super) enum ExplainCommand {
    /// A claim, by NAME, NAMESPACE/NAME or UID: also one that was refused or released, or that ended within the last day
    Claim {
        #[arg(add = Named::Claims.candidates())]
        name: String,
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// A driver, by its name, or that of its file or socket
    Driver {
        #[arg(add = Named::Drivers.candidates())]
        name: String,
    },
    /// An extended resource: by which mechanism it is offered, and why
    Resource {
        #[arg(add = Named::Resources.candidates())]
        name: String,
    },
    /// A device, by [DRIVER/][NODE/][POOL/]NAME, or one that a driver sees and does not offer, by [DRIVER/]NAME
    Device {
        #[arg(add = Named::WholeDevices.candidates())]
        name: String,
    },
}

pub(super) async fn run(location: &Location, command: ExplainCommand) -> Result<()> {
    let client = connect(location).await?;
    match command {
        ExplainCommand::Claim { name, output } => claim(location, client, &name, output).await,
        ExplainCommand::Driver { name } => driver(client, &name).await,
        ExplainCommand::Resource { name } => resource(client, &name).await,
        ExplainCommand::Device { name } => device(client, &name).await,
    }
}

async fn claim(location: &Location, mut client: Client, name: &str, format: Format) -> Result<()> {
    let mut answer = client
        .list_claims(names::claims_and_ended(name, true))
        .await?
        .into_inner();
    let mut objects = local_api::claims(location).await?;
    let created = objects.iter().map(|object| {
        ["/metadata/uid", "/metadata/creationTimestamp"]
            .map(|field| local_api::text(object, field).to_owned())
    });
    let created = created.map(|[uid, created]| (uid, created)).collect();
    objects.retain(|object| {
        let uid = local_api::text(object, "/metadata/uid");
        let waiting = answer.waiting.iter().filter_map(|of| of.id.as_ref());
        !waiting.into_iter().any(|id| id.uid == uid)
    });
    add_objects(&mut answer.claims, &objects, name);
    let v1::ListClaimsResponse {
        claims,
        refused,
        released,
        waiting,
        ended,
    } = &answer;
    // A name may have had many claims: the one that is here is meant.
    let ended = if claims.is_empty() {
        ended.as_slice()
    } else {
        &[]
    };
    let is_unknown = claims.is_empty() && refused.is_empty() && released.is_empty();
    if is_unknown && waiting.is_empty() && ended.is_empty() {
        return Err(names::unknown("claim", name));
    }
    let explained = Explained {
        claims: claims.iter().map(Claim::new).collect(),
        refused,
        released,
        waiting,
        ended,
        created,
    };
    print(format, &explained, || join(explained.lines(now_ms())))
}

async fn driver(mut client: Client, name: &str) -> Result<()> {
    let request = v1::ListDriversRequest {
        name: name.to_owned(),
    };
    let drivers = client.list_drivers(request).await?.into_inner().drivers;
    let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
    if !drivers.is_empty() {
        let left_out = devices(&mut client).await?.left_out;
        let lines = drivers.iter().flat_map(|driver| {
            let of_driver = node
                .conditions
                .iter()
                .filter(|condition| is_of_driver(condition, driver));
            let left_out = left_out.iter().filter(|of| of.driver == driver.name);
            driver_lines(driver, of_driver, left_out)
        });
        return print_text(&join(lines));
    }
    let claims = client
        .list_claims(v1::ListClaimsRequest::default())
        .await?
        .into_inner()
        .claims;
    let lines = absent_driver_lines(name, &claims);
    if lines.is_empty() {
        Err(names::unknown("driver", name))
    } else {
        print_text(&join(lines))
    }
}

async fn resource(mut client: Client, name: &str) -> Result<()> {
    let resources = client
        .get_capacity(v1::GetCapacityRequest {})
        .await?
        .into_inner()
        .resources;
    let adapters = client
        .list_adapters(v1::ListAdaptersRequest {})
        .await?
        .into_inner()
        .adapters;
    let adapters = adapters.iter().filter(|adapter| adapter.resource == name);
    let adapter: Vec<_> = adapters.flat_map(adapter_lines).collect();
    let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
    let Some(resource) = resources.iter().find(|resource| resource.name == name) else {
        let conditions: Vec<_> = condition_lines(&node.conditions, |of| of.subject == name);
        if adapter.is_empty() && conditions.is_empty() {
            return Err(names::unknown("resource", name));
        }
        return print_text(&join(
            [vec![format!("{name} is not offered")], conditions, adapter].concat(),
        ));
    };
    let v1::ListDevicesResponse { devices, left_out } = devices(&mut client).await?;
    let of_resource = devices
        .iter()
        .filter(|device| device.extended_resource == resource.name);
    let pools = of_resource
        .map(|device| format!("{}/{}", device.driver, device.pool))
        .collect();
    let lines = resource_lines(resource, &pools, &node.conditions);
    let left_out = left_out.iter().filter(|of| of.extended_resource == name);
    let left_out = left_out.flat_map(left_out_lines).collect();
    print_text(&join([lines, left_out, adapter].concat()))
}

async fn devices(client: &mut Client) -> Result<v1::ListDevicesResponse> {
    let request = v1::ListDevicesRequest::default();
    Ok(client.list_devices(request).await?.into_inner())
}

async fn device(mut client: Client, name: &str) -> Result<()> {
    let answer = devices(&mut client).await?;
    let lines = lines_of_device(&answer, name);
    if lines.is_empty() {
        Err(names::unknown("device", name))
    } else {
        print_text(&join(lines))
    }
}

/// Describes every device of a name, offered or not.
fn lines_of_device(answer: &v1::ListDevicesResponse, name: &str) -> Vec<String> {
    let offered = answer.devices.iter().filter(|device| {
        let local = device.pool.rsplit('/').next().unwrap_or_default();
        [device.pool.as_str(), local]
            .into_iter()
            .any(|pool| is_called(&[&device.driver, pool, &device.name], name))
    });
    let mut lines: Vec<_> = offered.flat_map(device_lines).collect();
    for of in &answer.left_out {
        for device in &of.devices {
            let v1::LeftOutDevice { name: own, reason } = device;
            if is_called(&[&of.driver, &of.extended_resource, own], name) {
                lines.push(format!("{own} of {} is not offered: {reason}", source(of)));
            }
        }
    }
    lines
}

/// Returns whether a name is that of a device, alone or behind the end of what it belongs to: `gpu-0`, `gpus/gpu-0`, `node-1/gpus/gpu-0`.
fn is_called(path: &[&str], name: &str) -> bool {
    let parts: Vec<_> = path
        .iter()
        .filter(|part| !part.is_empty())
        .copied()
        .collect();
    let whole = parts.join("/");
    let own = path.last().map_or(0, |own| own.len());
    let is_end = whole
        .strip_suffix(name)
        .is_some_and(|before| before.is_empty() || before.ends_with('/'));
    name.len() >= own && is_end
}

fn device_lines(device: &v1::Device) -> Vec<String> {
    let v1::Device {
        driver,
        pool,
        name,
        health,
        health_message,
        extended_resource,
        ..
    } = device;
    let of = [driver, pool].map(String::as_str);
    let of = of.into_iter().filter(|part| !part.is_empty());
    let mut lines = vec![format!(
        "{name} of {} is offered",
        of.collect::<Vec<_>>().join("/")
    )];
    let because = match health_message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    lines.push(format!("  health: {health}{because}"));
    let users = device
        .claims
        .iter()
        .map(|claim| format!("claim {}", describe::name(claim)));
    let pods = device
        .pods
        .iter()
        .map(|pod| format!("pod {}", describe::name(pod)));
    let users: Vec<_> = users.chain(pods).collect();
    let used = match users.as_slice() {
        [] => "  free".to_owned(),
        users => format!("  used by {}", users.join(", ")),
    };
    lines.push(used);
    if !extended_resource.is_empty() {
        lines.push(format!("  extended resource: {extended_resource}"));
    }
    let taints = device.taints.iter().map(describe::taint);
    lines.extend(taints.map(|taint| format!("  taint: {taint}")));
    let annotations: BTreeMap<_, _> = device.annotations.iter().collect();
    lines.extend(annotations.into_iter().map(|(key, value)| {
        let value = one_line(value, LABEL_VALUE_BYTES_MAX);
        format!("  annotation: {key}={value}")
    }));
    lines
}

/// Names what leaves out devices: a driver, or the device plugin of a resource.
fn source(left_out: &v1::LeftOut) -> String {
    let v1::LeftOut {
        driver,
        extended_resource,
        ..
    } = left_out;
    if extended_resource.is_empty() {
        driver.clone()
    } else {
        format!("the device plugin of {extended_resource}")
    }
}

fn left_out_lines(left_out: &v1::LeftOut) -> Vec<String> {
    let v1::LeftOut { count, devices, .. } = left_out;
    let mut lines = vec![format!(
        "  not offered: {}",
        describe::count(*count, "device")
    )];
    lines.extend(devices.iter().map(|device| {
        let v1::LeftOutDevice { name, reason } = device;
        format!("    {name}: {reason}")
    }));
    let more = usize::try_from(*count).map_or(0, |count| count.saturating_sub(devices.len()));
    lines.extend((more > 0).then(|| format!("    and {more} more")));
    lines
}

/// Describes an adapter's use of a resource, and the devices that it cannot offer yet.
fn adapter_lines(adapter: &v1::Adapter) -> Vec<String> {
    let v1::Adapter {
        driver,
        source,
        enabled,
        removed,
        held,
        mechanism,
        ..
    } = adapter;
    let is_of_cluster = !mechanism.is_empty();
    let state = match (removed, enabled) {
        (true, _) => "is in no file any more, and acts as a disabled one",
        (false, true) if is_of_cluster => "is enabled: the scheduler is to have the devices",
        (false, true) => "is enabled",
        (false, false) if !is_of_cluster => "is disabled, which changes nothing without Kubernetes",
        (false, false) => "is disabled: the kubelet's device manager is to have the devices",
    };
    let mut lines = vec![format!("  adapter: driver {driver} of {source} {state}")];
    lines.extend(waits(adapter).map(|line| format!("  {line}")));
    if !held.is_empty() {
        lines.push(format!(
            "  pods have from the time before the adapter: {}",
            held.join(", ")
        ));
    }
    lines
}

/// `pools`: of the resource, as `DRIVER/POOL`.
fn resource_lines(
    resource: &v1::Resource,
    pools: &BTreeSet<String>,
    conditions: &[v1::Condition],
) -> Vec<String> {
    let v1::Resource {
        name,
        capacity,
        allocatable,
        allocated,
        driver,
        mechanism,
        mechanism_reason,
        ..
    } = resource;
    let offered = match mechanism.as_str() {
        "" => "is allocated by this daemon".to_owned(),
        "none" => "is offered by neither mechanism now".to_owned(),
        mechanism => format!("is offered by {mechanism}"),
    };
    let from = if driver.is_empty() {
        "no plugin or driver"
    } else {
        driver
    };
    let mut lines = vec![
        format!("{name} of {from} {offered}"),
        format!("  {capacity} devices, {allocatable} healthy, {allocated} allocated"),
    ];
    lines.extend((!mechanism_reason.is_empty()).then(|| format!("  because: {mechanism_reason}")));
    if !mechanism.is_empty()
        && let (Ok(resource), Ok(_)) = (ExtendedResource::new(name), DriverName::new(driver))
    {
        let class = class_name(&resource);
        lines.push(format!(
            "  DeviceClass: {class}, of which pods also request deviceclass.resource.kubernetes.io/{class}"
        ));
    }
    lines.extend(condition_lines(conditions, |condition| {
        condition.subject == *name || pools.contains(&condition.subject)
    }));
    lines
}

fn condition_lines<'a>(
    conditions: impl IntoIterator<Item = &'a v1::Condition>,
    is_wanted: impl Fn(&v1::Condition) -> bool,
) -> Vec<String> {
    let wanted = conditions
        .into_iter()
        .filter(|condition| is_wanted(condition));
    wanted
        .flat_map(|condition| describe::problem(&condition.problem, "  "))
        .collect()
}

/// Returns whether a condition is of a driver: its subject is the driver, its file or socket, or one of its pools.
fn is_of_driver(condition: &v1::Condition, driver: &v1::Driver) -> bool {
    let v1::Driver { name, source, .. } = driver;
    let subject = &condition.subject;
    let is_pool = || {
        let rest = subject.strip_prefix(name.as_str());
        rest.is_some_and(|rest| rest.starts_with('/'))
    };
    subject == source || !name.is_empty() && (subject == name || is_pool())
}

/// A driver that is not here, with the claims that it prepared; nothing if it prepared none.
fn absent_driver_lines(name: &str, claims: &[v1::ClaimStatus]) -> Vec<String> {
    let parts = claims.iter().flat_map(|claim| {
        let of_driver = claim.drivers.iter().filter(|part| part.driver == name);
        of_driver.map(|part| {
            let id = claim.id.as_ref().map(describe::name).unwrap_or_default();
            format!(
                "  claim {id} is {}: {}",
                part.state,
                part.devices.join(", ")
            )
        })
    });
    let parts: Vec<_> = parts.collect();
    if parts.is_empty() {
        return parts;
    }
    let first = format!("{name} is not here, and has claims");
    let next = "  next: the claims are unprepared by the driver when it is back, or released by `nodedock release claim`";
    [first]
        .into_iter()
        .chain(parts)
        .chain([next.to_owned()])
        .collect()
}

/// `conditions` and `left_out`: of this driver.
fn driver_lines<'a>(
    driver: &v1::Driver,
    conditions: impl IntoIterator<Item = &'a v1::Condition>,
    left_out: impl IntoIterator<Item = &'a v1::LeftOut>,
) -> Vec<String> {
    let name = if driver.name.is_empty() {
        "driver of unknown name"
    } else {
        &driver.name
    };
    let mut lines = vec![format!(
        "{name} ({}, {}) is {}",
        driver.kind, driver.source, driver.state
    )];
    let facts = [
        ("summary", &driver.summary),
        ("version", &driver.version),
        ("digest", &driver.digest),
        ("parameters", &driver.parameters),
        ("reason", &driver.reason),
    ];
    let facts = facts.into_iter().filter(|(_, text)| !text.is_empty());
    lines.extend(facts.map(|(label, text)| format!("  {label}: {text}")));
    lines.extend(
        driver
            .missing_grants
            .iter()
            .map(|missing| format!("  not granted: {missing}")),
    );
    let trust = driver
        .trust
        .as_ref()
        .filter(|trust| trust.mode != "off" || !trust.key.is_empty() || !trust.pin.is_empty());
    lines.extend(trust.map(|trust| format!("  trust: {}", describe::trust(trust))));
    if driver.discovered_ms > 0 {
        lines.push(format!(
            "  {} devices, last polled on {}",
            driver.devices,
            rfc3339(driver.discovered_ms)
        ));
    }
    lines.extend(driver.native.iter().flat_map(native_lines));
    lines.extend(describe::problem(&driver.problem, "  "));
    // The reason above is not repeated.
    let is_new = |condition: &v1::Condition| {
        let problem = condition.problem.as_ref();
        problem.is_some_and(|problem| {
            driver.reason.is_empty() || !problem.message.contains(&driver.reason)
        })
    };
    lines.extend(condition_lines(conditions, is_new));
    lines.extend(left_out.into_iter().flat_map(left_out_lines));
    lines.extend(history(&driver.timeline));
    lines
}

fn native_lines(plugin: &v1::NativePlugin) -> Vec<String> {
    let mut lines = vec![
        format!("  {}: {}", plugin.connection, plugin.endpoint),
        format!("  services: {}", plugin.services.join(", ")),
    ];
    lines.extend(plugin.health.iter().map(|device| {
        let why = if device.message.is_empty() {
            String::new()
        } else {
            format!(": {}", device.message)
        };
        format!(
            "  device {}/{} is {}{why}",
            device.pool, device.device, device.health
        )
    }));
    lines
}

/// The entries of a timeline, each with the time that passed since the one before.
fn history(timeline: &[v1::Transition]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut before = None;
    for entry in timeline {
        let passed = before
            .replace(entry.at_ms)
            .map(|before| format!("+{}", describe::elapsed(before, entry.at_ms)));
        let (at, passed) = (rfc3339(entry.at_ms), passed.unwrap_or_default());
        lines.push(format!(
            "    {at}  {passed:>12}  {}",
            describe::transition(entry)
        ));
        lines.extend(describe::problem(&entry.problem, "      "));
    }
    if !lines.is_empty() {
        lines.insert(0, "  history:".to_owned());
    }
    lines
}

/// All claims of a name that the daemon knows of.
#[derive(Serialize)]
struct Explained<'a> {
    claims: Vec<Claim<'a>>,
    /// Refused and rolled back.
    refused: &'a [v1::RefusedClaim],
    /// Released by an operator.
    released: &'a [v1::ReleasedClaim],
    /// Claims of the local API that are not allocated.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    waiting: &'a [v1::WaitingClaim],
    /// Unprepared within the last day.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    ended: &'a [v1::EndedClaim],
    /// Times at which claims of the local API were made, by UID.
    #[serde(skip)]
    created: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Claim<'a> {
    #[serde(flatten)]
    id: &'a Option<v1::ObjectRef>,
    state: &'a str,
    /// None: from before the oldest entry of the timeline.
    since: Option<String>,
    stale_boot: bool,
    pods: &'a [v1::ObjectRef],
    #[serde(skip_serializing_if = "Option::is_none")]
    kubelet: Option<&'a v1::KubeletHold>,
    drivers: &'a [v1::ClaimDriver],
    values: &'a [v1::SysfsValue],
    next: Vec<String>,
    timeline: &'a [v1::Transition],
}

impl Explained<'_> {
    fn lines(&self, now_ms: u64) -> Vec<String> {
        let claims = self.claims.iter().flat_map(|claim| claim.lines(now_ms));
        let refused = self
            .refused
            .iter()
            .flat_map(|refused| refused_lines(refused, now_ms));
        let released = self
            .released
            .iter()
            .flat_map(|released| released_lines(released, now_ms));
        let waiting = self.waiting.iter().flat_map(|waiting| {
            let uid = waiting.id.as_ref().map(|id| id.uid.as_str());
            let created = uid.and_then(|uid| self.created.get(uid));
            waiting::lines(waiting, created.map_or("", String::as_str))
        });
        waiting
            .chain(claims)
            .chain(refused)
            .chain(released)
            .chain(
                self.ended
                    .iter()
                    .flat_map(|ended| ended_lines(ended, now_ms)),
            )
            .collect()
    }
}

impl<'a> Claim<'a> {
    fn new(claim: &'a v1::ClaimStatus) -> Self {
        let v1::ClaimStatus {
            id,
            state,
            pods,
            drivers,
            timeline,
            stale_boot,
            values,
            kubelet,
            ..
        } = claim;
        let since = since(state, timeline).map(rfc3339);
        let next = drivers
            .iter()
            .filter_map(|driver| next_step(id.as_ref()?, driver))
            .collect();
        let (stale_boot, kubelet) = (*stale_boot, kubelet.as_ref());
        Self {
            id,
            state,
            since,
            stale_boot,
            pods,
            kubelet,
            drivers,
            values,
            next,
            timeline,
        }
    }

    fn lines(&self, now_ms: u64) -> Vec<String> {
        let since = since(self.state, self.timeline);
        let since =
            since.map(|at| format!(" since {} ({})", rfc3339(at), describe::elapsed(at, now_ms)));
        let id = self.id.as_ref().map(describe::object).unwrap_or_default();
        let mut lines = vec![format!(
            "claim {id} is {}{}",
            describe::claim_state(self.state, self.stale_boot),
            since.unwrap_or_default()
        )];
        if self.stale_boot {
            lines.push(
                "  prepared in an earlier boot; preparing its pod prepares it again".to_owned(),
            );
        }
        lines.extend(pod_lines(self.pods));
        lines.extend(
            self.kubelet
                .map(|hold| format!("  {}", describe::kubelet_hold(hold))),
        );
        lines.extend(self.drivers.iter().flat_map(claim_driver_lines));
        lines.extend(
            self.values
                .iter()
                .map(|value| format!("  {}", describe::sysfs_value(value))),
        );
        lines.extend(self.next.iter().map(|next| format!("  next: {next}")));
        lines.extend(history(self.timeline));
        lines
    }
}

fn claim_driver_lines(driver: &v1::ClaimDriver) -> Vec<String> {
    let version = match driver.version.as_str() {
        "" => String::new(),
        version => format!(" by version {version}"),
    };
    let (name, state, devices) = (&driver.driver, &driver.state, driver.devices.join(", "));
    let mut lines = vec![format!("  driver {name}: {state}{version}: {devices}")];
    lines.extend(driver.gone_devices.iter().map(|device| {
        format!("    device {device} is gone: the driver does not have it any more")
    }));
    lines.extend(
        driver
            .cdi_devices
            .iter()
            .map(|name| format!("    CDI device {name}")),
    );
    lines.extend(describe::problem(&driver.problem, "    "));
    if driver.attempts > 0 {
        let attempts = describe::count(driver.attempts, "failed attempt");
        lines.push(format!("    {attempts} since the daemon started"));
    }
    lines
}

fn refused_lines(refused: &v1::RefusedClaim, now_ms: u64) -> Vec<String> {
    let claim = refused
        .id
        .as_ref()
        .map(describe::object)
        .unwrap_or_default();
    let (at, passed) = (
        rfc3339(refused.at_ms),
        describe::elapsed(refused.at_ms, now_ms),
    );
    let v1::RefusedClaim {
        driver, attempts, ..
    } = refused;
    let mut lines = vec![format!(
        "claim {claim} was refused by driver {driver} on {at} ({passed} ago), after {}",
        describe::count(*attempts, "attempt")
    )];
    lines.extend(describe::problem(&refused.problem, "  "));
    lines.push("  it was rolled back".to_owned());
    lines.extend(
        refused
            .retry
            .as_ref()
            .map(|retry| format!("  next: {}", next_prepare(driver, retry))),
    );
    lines
}

fn released_lines(released: &v1::ReleasedClaim, now_ms: u64) -> Vec<String> {
    let claim = released
        .id
        .as_ref()
        .map(describe::object)
        .unwrap_or_default();
    let (at, passed) = (
        rfc3339(released.at_ms),
        describe::elapsed(released.at_ms, now_ms),
    );
    let by = describe::caller(released.by.as_ref().unwrap_or(&v1::Caller::default()));
    let mut lines = vec![format!(
        "claim {claim} was released on {at} ({passed} ago) by {by}"
    )];
    lines.extend(pod_lines(&released.pods));
    if released.untold.is_empty() {
        lines.push("  every driver unprepared it".to_owned());
    }
    for v1::UntoldDriver {
        driver,
        devices,
        problem,
    } in &released.untold
    {
        let devices = devices.join(", ");
        lines.push(format!(
            "  driver {driver} did not unprepare it, and may still use {devices}"
        ));
        lines.extend(describe::problem(problem, "    "));
    }
    lines.extend(
        released
            .values
            .iter()
            .map(|value| format!("  {}", describe::sysfs_value(value))),
    );
    lines.extend(history(&released.timeline));
    lines
}

fn ended_lines(ended: &v1::EndedClaim, now_ms: u64) -> Vec<String> {
    let claim = ended.id.as_ref().map(describe::object).unwrap_or_default();
    let (at, passed) = (rfc3339(ended.at_ms), describe::elapsed(ended.at_ms, now_ms));
    let mut lines = vec![format!(
        "claim {claim} was unprepared on {at} ({passed} ago)"
    )];
    let pods = ended.pods.iter().map(describe::object);
    lines.extend(pods.map(|pod| format!("  last in use by pod {pod}")));
    let devices = ended.devices.iter();
    lines.extend(devices.map(|device| format!("  had device {device}")));
    lines.extend(history(&ended.timeline));
    lines
}

fn pod_lines(pods: &[v1::ObjectRef]) -> impl Iterator<Item = String> {
    pods.iter()
        .map(|pod| format!("  in use by pod {}", describe::object(pod)))
}

/// Returns the time at which a claim entered its state: that of the newest entry that begins the state and that no later entry leaves.
fn since(state: &str, timeline: &[v1::Transition]) -> Option<u64> {
    let begin = match state {
        // Each repeated request is an entry of its own: the first after another state counts.
        "preparing" => {
            let from = timeline
                .iter()
                .rposition(|entry| matches!(entry.what.as_str(), "prepared" | "unpreparing"))
                .map_or(0, |at| at + 1);
            timeline[from..].iter().find(|entry| begins(entry, state))
        }
        _ => timeline.iter().rev().find(|entry| begins(entry, state)),
    };
    begin.map(|entry| entry.at_ms)
}

fn begins(entry: &v1::Transition, state: &str) -> bool {
    match state {
        "unpreparing" => matches!(entry.what.as_str(), "unpreparing" | "rolled back"),
        "prepared" => entry.what == "prepared",
        _ => entry.what.starts_with("preparing"),
    }
}

fn next_step(claim: &v1::ObjectRef, driver: &v1::ClaimDriver) -> Option<String> {
    let (name, retry) = (&driver.driver, driver.retry.as_ref()?);
    if driver.state != "unpreparing" {
        return Some(next_prepare(name, retry));
    }
    let v1::ObjectRef {
        namespace,
        name: claim,
        ..
    } = claim;
    Some(match retry.when.as_str() {
        "at" => format!(
            "the daemon retries unprepare by driver {name} on {}, or as soon as it serves again",
            rfc3339(retry.at_ms)
        ),
        "when-serving" => format!(
            "unprepared as soon as driver {name} serves; if it never will: `nodedock release claim {claim} --namespace {namespace}`"
        ),
        "when-changed" => next_prepare(name, retry),
        _ => format!("driver {name} is unpreparing it"),
    })
}

/// Describes the time at which a prepare of the claim's pod can succeed.
fn next_prepare(driver: &str, retry: &v1::Retry) -> String {
    match retry.when.as_str() {
        "at" => format!(
            "driver {driver} may be called again on {}",
            rfc3339(retry.at_ms)
        ),
        "when-serving" => format!("retry its pod when driver {driver} serves"),
        "when-changed" => format!(
            "driver {driver} is not called again until the request changes, or the driver does (version, grant, config, devices)"
        ),
        _ => format!("a retry of its pod calls driver {driver}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_out() -> v1::LeftOut {
        v1::LeftOut {
            driver: "gpu.example.com".to_owned(),
            count: 3,
            devices: vec![v1::LeftOutDevice {
                name: "0000:3b:00.0".to_owned(),
                reason: "its IOMMU group is shared".to_owned(),
            }],
            ..v1::LeftOut::default()
        }
    }

    #[test]
    fn device_explanation_has_left_out_devices() {
        let offered = |pool: &str| v1::Device {
            driver: "gpu.example.com".to_owned(),
            pool: pool.to_owned(),
            name: "gpu-0".to_owned(),
            health: "unhealthy".to_owned(),
            health_message: "too hot".to_owned(),
            annotations: [("b.example.com/slot", "4\n  free"), ("a", "")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            ..v1::Device::default()
        };
        let of_plugin = v1::LeftOut {
            driver: "/plugins/nic.sock".to_owned(),
            extended_resource: "example.com/nic".to_owned(),
            ..left_out()
        };
        let answer = v1::ListDevicesResponse {
            devices: vec![offered("node-1/a"), offered("node-1/b")],
            left_out: vec![left_out(), of_plugin],
        };
        let lines = |name: &str| lines_of_device(&answer, name);
        assert_eq!(
            lines("gpu.example.com/a/gpu-0"),
            [
                "gpu-0 of gpu.example.com/node-1/a is offered",
                "  health: unhealthy: too hot",
                "  free",
                "  annotation: a=",
                "  annotation: b.example.com/slot=4   free",
            ]
        );
        assert_eq!(lines("node-1/a/gpu-0"), lines("a/gpu-0"));
        assert_eq!(lines("gpu-0").len(), 10);
        assert_eq!(
            lines("0000:3b:00.0"),
            [
                "0000:3b:00.0 of gpu.example.com is not offered: its IOMMU group is shared",
                "0000:3b:00.0 of the device plugin of example.com/nic is not offered: its IOMMU group is shared",
            ]
        );
        assert_eq!(lines("gpu.example.com/0000:3b:00.0").len(), 1);
        for unknown in ["", "0", "pu-0", "gpu-0/", "a", "gpu.example.com"] {
            assert!(lines(unknown).is_empty(), "{unknown}");
        }
    }

    #[test]
    fn standalone_adapter_explanation_mentions_no_kubelet() {
        let lines = |mechanism: &str| {
            let (mechanism, reason) = (mechanism.to_owned(), "the plugin is gone".to_owned());
            adapter_lines(&v1::Adapter {
                mechanism,
                reason,
                ..v1::Adapter::default()
            })
            .join(" ")
        };
        assert!(!lines("").contains("kubelet") && lines("").contains("the plugin is gone"));
        assert!(lines("none").contains("kubelet's device manager is to have the devices"));
    }

    fn entry(at_ms: u64, what: &str) -> v1::Transition {
        v1::Transition {
            at_ms,
            what: what.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn resource_explanation_has_mechanism_and_conditions() {
        let resource = v1::Resource {
            name: "example.com/gpu".into(),
            driver: "gpu.example.com".into(),
            mechanism: "dra".into(),
            mechanism_reason: "of the test".into(),
            capacity: 8,
            allocatable: 7,
            allocated: 1,
            ..Default::default()
        };
        let condition = |subject: &str, message: &str| v1::Condition {
            subject: subject.to_owned(),
            problem: Some(v1::Problem {
                message: message.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let conditions = [
            condition("example.com/gpu", "no class"),
            condition("gpu.example.com/gpus", "withheld"),
            condition("gpu.example.com/nics", "another"),
        ];
        let pools = ["gpu.example.com/gpus".to_owned()].into();
        let text = join(resource_lines(&resource, &pools, &conditions));
        for part in [
            "example.com/gpu of gpu.example.com is offered by dra\n",
            "8 devices, 7 healthy, 1 allocated",
            "because: of the test",
            "deviceclass.resource.kubernetes.io/example.com-gpu",
            "no class",
            "withheld",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("another"), "{text}");
        let plain = v1::Resource {
            mechanism: String::new(),
            mechanism_reason: String::new(),
            ..resource
        };
        let text = join(resource_lines(&plain, &pools, &[]));
        assert!(
            text.contains("is allocated by this daemon") && !text.contains("because"),
            "{text}"
        );
    }

    #[test]
    fn driver_explanation_has_its_conditions() {
        let driver = v1::Driver {
            name: "gpu.example.com".into(),
            source: "gpu.wasm".into(),
            state: "failed".into(),
            reason: "no code".into(),
            ..Default::default()
        };
        let condition = |subject: &str, message: &str| v1::Condition {
            subject: subject.to_owned(),
            problem: Some(v1::Problem {
                message: message.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let conditions = [
            condition("gpu.wasm", "gpu.wasm is failed: no code"),
            condition("gpu.example.com", "claims hold devices"),
            condition("gpu.example.com/gpus", "slices are changed"),
            condition("gpu.example.com.other/gpus", "another"),
            condition("", "of the daemon"),
        ];
        let of_driver = conditions.iter().filter(|of| is_of_driver(of, &driver));
        let text = join(driver_lines(&driver, of_driver, &[left_out()]));
        assert_eq!(text.matches("no code").count(), 1, "{text}");
        for part in [
            "claims hold devices",
            "slices are changed",
            "  not offered: 3 devices\n    0000:3b:00.0: its IOMMU group is shared\n    and 2 more",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        for part in ["another", "of the daemon"] {
            assert!(!text.contains(part), "{part}: {text}");
        }
        let nameless = v1::Driver {
            name: String::new(),
            ..driver
        };
        assert!(!is_of_driver(&conditions[4], &nameless));
        assert!(!is_of_driver(
            &condition("/var", "of a directory"),
            &nameless
        ));
    }

    #[test]
    fn missing_driver_is_explained_by_claims() {
        let part = |driver: &str| v1::ClaimDriver {
            driver: driver.to_owned(),
            state: "prepared".to_owned(),
            devices: vec!["gpus/gpu-0".to_owned()],
            ..Default::default()
        };
        let id = v1::ObjectRef {
            namespace: "ml".into(),
            name: "train".into(),
            ..Default::default()
        };
        let claim = v1::ClaimStatus {
            id: Some(id),
            drivers: vec![part("gpu.example.com"), part("nic.example.com")],
            ..Default::default()
        };
        let lines = absent_driver_lines("gpu.example.com", std::slice::from_ref(&claim));
        assert_eq!(lines[0], "gpu.example.com is not here, and has claims");
        assert_eq!(lines[1], "  claim ml/train is prepared: gpus/gpu-0");
        assert!(
            lines.len() == 3 && lines[2].contains("nodedock release claim"),
            "{lines:?}"
        );
        assert!(absent_driver_lines("fan.example.com", &[claim]).is_empty());
    }

    #[test]
    fn state_age_counts_from_its_entry() {
        let history = [
            entry(1, "preparing"),
            entry(2, "refused by driver"),
            entry(3, "preparing"),
            entry(4, "prepared"),
            entry(5, "joined"),
            entry(6, "unpreparing"),
            entry(7, "not unprepared by driver"),
        ];
        let cases = [
            ("preparing", 3, Some(1)),
            ("prepared", 5, Some(4)),
            ("unpreparing", 7, Some(6)),
            ("prepared", 3, None),
        ];
        for (state, length, expected) in cases {
            assert_eq!(since(state, &history[..length]), expected, "{state}");
        }
        let again = [
            entry(4, "prepared"),
            entry(9, "preparing after a new boot"),
            entry(10, "preparing"),
        ];
        assert_eq!(since("preparing", &again), Some(9));
    }
}
