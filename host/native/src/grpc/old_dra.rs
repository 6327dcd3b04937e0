//! A plugin of the DRA API before `v1beta1` as a `ClaimDriver`: `v1alpha3` (claims in batches, Kubernetes 1.28 to 1.31) or `v1alpha2` (one claim
//! in a call, 1.27 to 1.30).
//!
//! What its controller would have left in a claim for it, the resource handle, are the claim's opaque parameters. A plugin that lists its devices
//! (`NodeListAndWatchResources`, 1.30) gets its own names of the allocated ones, and the host publishes the list as a pool, with names that encode those.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use nodedock_proto::kubelet::dra::{v1, v1alpha2, v1alpha3 as wire};
use nodedock_proto::prost::Message;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Request, Status, Streaming};

use super::connection::dial;
use super::{Caller, clean, convert, problem, rpc};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, ClaimDriver, DriverStats, Outcomes, Published, all_failed};
use nodedock_model::{
    AllocatedDevice, AttributeValue, Capacity, Device, DeviceAccess, DeviceName, DriverClaim,
    DriverClaimRecord, DriverName, Inventory, Pool, PoolName, PreparedClaim, PreparedDevice,
    Problem, ProblemCode, QualifiedName, device_id, device_name, is_cdi_qualified_name, limit,
    quantity,
};

const V1ALPHA3: &str = "v1alpha3.Node";
const V1ALPHA2: &str = "v1alpha2.Node";
/// The pool of devices that a plugin lists.
const POOL: &str = "resources";
/// Time limit until a plugin has listed its devices, or has answered that it lists none.
const FIRST_LIST: Duration = Duration::from_secs(2);
/// Delay from the end of a list's stream to the next.
const LIST_AGAIN: Duration = Duration::from_secs(5);

/// One instance of a driver of an old generation.
pub struct OldDraPlugin {
    pub caller: Caller,
    pub node: String,
    /// It lists its devices.
    pub lists: bool,
    /// It does not serve `v1alpha3`.
    pub is_single: AtomicBool,
}

impl OldDraPlugin {
    /// Calls `v1alpha3` for all claims, or, if the plugin does not serve that, `v1alpha2` for each.
    async fn prepared(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let until = Instant::now() + call.deadline;
        if !self.is_single.load(Ordering::Relaxed) {
            let request = wire::NodePrepareResourcesRequest {
                claims: claims.iter().map(|claim| self.claim(claim)).collect(),
            };
            let answer: Result<wire::NodePrepareResourcesResponse, _> = self
                .caller
                .call(call, V1ALPHA3, "NodePrepareResources", request)
                .await;
            match answer {
                Ok(answer) => return self.of_batch(call, claims, answer),
                Err(problem) if self.is_without(&problem) => {}
                Err(problem) => {
                    return all_failed(claims.iter().map(|claim| &claim.id.uid), &problem);
                }
            }
        }
        let mut outcomes = Outcomes::new();
        for claim in claims {
            let call = remaining(call, until);
            let wire::Claim {
                namespace,
                uid,
                name,
                resource_handle,
                structured_resource_handle,
            } = self.claim(claim);
            let request = v1alpha2::NodePrepareResourceRequest {
                namespace,
                claim_uid: uid,
                claim_name: name,
                resource_handle,
                structured_resource_handle,
            };
            let answer: Result<v1alpha2::NodePrepareResourceResponse, _> = self
                .caller
                .call(&call, V1ALPHA2, "NodePrepareResource", request)
                .await;
            outcomes.insert(
                claim.id.uid.clone(),
                answer.and_then(|answer| {
                    self.devices(
                        claim,
                        answer
                            .cdi_devices
                            .into_iter()
                            .map(String::into_bytes)
                            .collect(),
                    )
                }),
            );
        }
        outcomes
    }

    fn of_batch(
        &self,
        call: &Call,
        claims: &[DriverClaim],
        answer: wire::NodePrepareResourcesResponse,
    ) -> Outcomes<PreparedClaim> {
        let by_uid: BTreeMap<&str, &DriverClaim> = claims
            .iter()
            .map(|claim| (claim.id.uid.as_str(), claim))
            .collect();
        let peer = self.caller.peer();
        let answers = answer.into_claims().into_iter().map(|(uid, one)| {
            let outcome = match by_uid.get(uid.as_str()) {
                _ if !one.error.is_empty() => Err(problem::of_claim(&peer, &one.error)),
                Some(claim) => self.devices(claim, one.devices),
                None => Ok(PreparedClaim::default()),
            };
            (uid, outcome)
        });
        let outcomes = self
            .caller
            .settle(call, claims.iter().map(|claim| &claim.id.uid), answers);
        for claim in claims {
            if let Some(Ok(prepared)) = outcomes.get(&claim.id.uid) {
                self.caller.note_strangers(call, claim, prepared);
            }
        }
        outcomes
    }

    /// Returns whether a call failed because the plugin does not serve batches, and remembers it: batches are then not tried again.
    fn is_without(&self, problem: &Problem) -> bool {
        let is_without = problem.code == ProblemCode::DriverWithoutService;
        if is_without {
            self.is_single.store(true, Ordering::Relaxed);
        }
        is_without
    }

    fn claim(&self, claim: &DriverClaim) -> wire::Claim {
        wire::Claim {
            namespace: claim.id.namespace.to_string(),
            uid: claim.id.uid.to_string(),
            name: claim.id.name.to_string(),
            resource_handle: parameters(claim, None).unwrap_or_default(),
            structured_resource_handle: self
                .lists
                .then(|| self.handle(claim))
                .into_iter()
                .collect(),
        }
    }

    fn handle(&self, claim: &DriverClaim) -> wire::StructuredResourceHandle {
        wire::StructuredResourceHandle {
            vendor_class_parameters: None,
            vendor_claim_parameters: raw(parameters(claim, None)),
            node_name: self.node.clone(),
            results: claim
                .devices
                .iter()
                .map(|device| wire::DriverAllocationResult {
                    vendor_request_parameters: raw(parameters(claim, Some(device))),
                    allocation_result_model: Some(wire::AllocationResultModel {
                        named_resources: Some(wire::NamedResourcesAllocationResult {
                            name: own_name(&device.device),
                        }),
                    }),
                })
                .collect(),
        }
    }

    /// The devices of an answer, whose entries are CDI names, or devices as `v1beta1` has them. CDI names are for all of the claim's requests: the
    /// first device has them.
    fn devices(
        &self,
        claim: &DriverClaim,
        entries: Vec<Vec<u8>>,
    ) -> Result<PreparedClaim, Problem> {
        // A message begins with the number of a field, a name with a letter or a digit.
        if entries
            .iter()
            .any(|entry| entry.first().is_none_or(|first| *first < b' '))
        {
            let devices = entries
                .iter()
                .map(|entry| v1::Device::decode(entry.as_slice()));
            let devices = devices
                .collect::<Result<_, _>>()
                .map_err(|error| self.not_valid(&error.to_string()))?;
            let devices = convert::prepared_devices(devices).map_err(|why| self.not_valid(&why))?;
            return Ok(PreparedClaim {
                devices,
                ..PreparedClaim::default()
            });
        }
        if entries.len() > limit::PLUGIN_CDI_NAMES_MAX {
            return Err(self.not_valid("too many CDI devices"));
        }
        let names = entries.into_iter().map(|entry| {
            let name = String::from_utf8(entry)
                .ok()
                .filter(|name| is_cdi_qualified_name(name));
            name.ok_or_else(|| self.not_valid("a CDI device is not VENDOR/CLASS=NAME"))
        });
        let names = names.collect::<Result<Vec<_>, _>>()?;
        let first = claim.devices.first().filter(|_| !names.is_empty());
        let device = first.map(|device| PreparedDevice {
            requests: Vec::new(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: None,
            access: DeviceAccess::CdiDevices(names.clone()),
            status: None,
            attributes: None,
        });
        Ok(PreparedClaim {
            devices: device.into_iter().collect(),
            ..PreparedClaim::default()
        })
    }

    fn not_valid(&self, why: &str) -> Problem {
        problem::not_valid(&self.caller.peer(), why)
    }

    async fn unprepared(&self, call: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let until = Instant::now() + call.deadline;
        let asked = claims.iter().map(|live| &live.claim.id.uid);
        let peer = self.caller.peer();
        if !self.is_single.load(Ordering::Relaxed) {
            let request = wire::NodeUnprepareResourcesRequest {
                claims: claims.iter().map(|live| self.claim(&live.claim)).collect(),
            };
            let answer: Result<wire::NodeUnprepareResourcesResponse, _> = self
                .caller
                .call(call, V1ALPHA3, "NodeUnprepareResources", request)
                .await;
            match answer {
                Ok(answer) => {
                    let outcomes = answer.into_claims().into_iter().map(|(uid, one)| {
                        let refused =
                            (!one.error.is_empty()).then(|| problem::of_claim(&peer, &one.error));
                        (uid, refused.map_or(Ok(()), Err))
                    });
                    return self.caller.settle(call, asked, outcomes);
                }
                Err(problem) if self.is_without(&problem) => {}
                Err(problem) => return all_failed(asked, &problem),
            }
        }
        let mut outcomes = Outcomes::new();
        for live in claims {
            let call = remaining(call, until);
            let wire::Claim {
                namespace,
                uid,
                name,
                resource_handle,
                structured_resource_handle,
            } = self.claim(&live.claim);
            let request = v1alpha2::NodeUnprepareResourceRequest {
                namespace,
                claim_uid: uid,
                claim_name: name,
                resource_handle,
                structured_resource_handle,
            };
            let answer: Result<v1alpha2::NodeUnprepareResourceResponse, _> = self
                .caller
                .call(&call, V1ALPHA2, "NodeUnprepareResource", request)
                .await;
            outcomes.insert(live.claim.id.uid.clone(), answer.map(drop));
        }
        outcomes
    }
}

fn raw(parameters: Option<String>) -> Option<wire::RawExtension> {
    parameters.map(|text| wire::RawExtension {
        raw: text.into_bytes(),
    })
}

#[async_trait]
impl ClaimDriver for OldDraPlugin {
    fn stats(&self) -> Option<DriverStats> {
        Some(DriverStats::Grpc(self.caller.rpcs.list()))
    }

    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        self.prepared(call, claims).await
    }

    async fn unprepare(&self, call: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        self.unprepared(call, claims).await
    }
}

/// A call with what is left of the time of all.
fn remaining(call: &Call, until: Instant) -> Call {
    let deadline = until.saturating_duration_since(Instant::now());
    Call {
        request_id: call.request_id.clone(),
        deadline,
    }
}

/// The opaque parameters of a claim, or of a device: of several the last counts, as the later entries take precedence. A scheduler names the
/// requests of parameters from a class, so without any for the whole claim those count.
fn parameters(claim: &DriverClaim, device: Option<&AllocatedDevice>) -> Option<String> {
    let mut newest_first = claim.configs.iter().rev();
    let config = match device {
        Some(device) => newest_first.find(|config| {
            let mut requests = config.requests.iter();
            requests.any(|of| *of == device.request || of == device.base_request())
        }),
        None => newest_first
            .find(|config| config.requests.is_empty())
            .or(claim.configs.last()),
    };
    config.map(|config| config.parameters.clone())
}

/// Waits until a plugin has listed its devices, and follows its lists until the tasks stop; `announce` is called after each but the first.
/// `None`: it lists none.
///
/// # Errors
///
/// It does not list them in time: the plugin is not registered, since no other program publishes them.
pub async fn inventory(
    driver: &DriverName,
    endpoint: &Path,
    tasks: &Tasks,
    announce: impl Fn() + Send + Sync + 'static,
) -> Result<Option<watch::Receiver<Arc<Published>>>, Problem> {
    let failed = |why: &str| {
        let message = clean(&format!("driver {driver} does not list its devices: {why}"));
        Problem::unavailable(ProblemCode::DriverUnavailable, message)
    };
    let (stream, list) = match tokio::time::timeout(FIRST_LIST, first_list(endpoint)).await {
        Ok(Ok(first)) => first,
        Ok(Err(status)) if status.code() == Code::Unimplemented => return Ok(None),
        Ok(Err(status)) => return Err(failed(status.message())),
        Err(_) => return Err(failed("there is none in time")),
    };
    let (sender, receiver) = watch::channel(Arc::new(published(driver, list)));
    let (driver, endpoint) = (driver.clone(), endpoint.to_owned());
    // Safe to drop: the next registration begins with a list.
    tasks.spawn_until_stopped("plugin-resources", async move {
        let take = |list| {
            sender.send_replace(Arc::new(published(&driver, list)));
            announce();
        };
        let mut stream = Some(stream);
        loop {
            let open = match stream.take() {
                Some(open) => Ok(open),
                None => first_list(&endpoint).await.map(|(open, list)| {
                    take(list);
                    open
                }),
            };
            if let Ok(mut open) = open {
                while let Ok(Some(list)) = open.message().await {
                    take(list);
                    tokio::time::sleep(limit::LIST_PACE).await;
                }
            }
            tokio::time::sleep(LIST_AGAIN).await;
        }
    });
    Ok(Some(receiver))
}

type Lists = Streaming<wire::NodeListAndWatchResourcesResponse>;

/// Reads the first list on a connection of its own: that of the calls may still be to a process that ends.
async fn first_list(
    endpoint: &Path,
) -> Result<(Lists, wire::NodeListAndWatchResourcesResponse), Status> {
    let (channel, _) = dial(endpoint, FIRST_LIST)
        .await
        .map_err(|error| Status::unavailable(chain(&error)))?;
    let path = format!("/{V1ALPHA3}/NodeListAndWatchResources");
    let asked = Request::new(wire::NodeListAndWatchResourcesRequest {});
    let mut stream: Lists =
        rpc::stream(channel, path, asked, limit::PLUGIN_ANSWER_BYTES_MAX).await?;
    let list = stream
        .message()
        .await?
        .ok_or_else(|| Status::unavailable("the list ended"))?;
    Ok((stream, list))
}

/// The devices of a list as a pool, each with the name that encodes the plugin's own. One whose name is too long for that, and an attribute that
/// the API has no room for, are left out.
fn published(driver: &DriverName, list: wire::NodeListAndWatchResourcesResponse) -> Published {
    let models = list
        .resources
        .into_iter()
        .filter_map(|model| model.named_resources);
    let mut devices = BTreeMap::new();
    let mut dropped = 0;
    for instance in models.flat_map(|model| model.instances) {
        let name = device_name(&instance.name);
        match device_id(&name) {
            Some(_) if devices.len() < limit::DEVICES_MAX => {
                drop(devices.insert(name, device(instance.attributes)))
            }
            _ => dropped += 1,
        }
    }
    if dropped > 0 {
        tracing::warn!(%driver, dropped, "the driver lists devices whose names are too long, or too many");
    }
    let pool = Pool {
        devices,
        ..Pool::default()
    };
    let name = PoolName::new(POOL).expect("it is a DNS label");
    Published {
        inventory: Inventory {
            pools: [(name, pool)].into(),
        },
        ..Published::default()
    }
}

/// The plugin's own name of a device. Before names were encoded a claim had the name itself.
fn own_name(name: &DeviceName) -> String {
    device_id(name).unwrap_or_else(|| name.to_string())
}

fn device(attributes: Vec<wire::NamedResourcesAttribute>) -> Device {
    let mut device = Device::default();
    for wire::NamedResourcesAttribute { name, value } in attributes {
        let (Ok(name), Some(value)) = (QualifiedName::new(&name), value) else {
            continue;
        };
        if device.attributes.len() + device.capacities.len() >= limit::ATTRIBUTES_MAX {
            break;
        }
        if let Some(wire::Quantity { string }) = &value.quantity {
            if quantity::nanos(string).is_some() {
                device.capacities.insert(
                    name,
                    Capacity {
                        value: string.clone(),
                        policy: None,
                    },
                );
            }
        } else if let Some(value) = attribute(value) {
            device.attributes.insert(name, value);
        }
    }
    device
}

fn attribute(value: wire::NamedResourcesAttributeValue) -> Option<AttributeValue> {
    let wire::NamedResourcesAttributeValue {
        bool,
        string,
        int,
        version,
        ..
    } = value;
    let text = string
        .filter(|text| text.len() <= limit::ATTRIBUTE_TEXT_MAX)
        .map(AttributeValue::Text);
    let version = version
        .and_then(|text| semver::Version::parse(&text).ok())
        .map(AttributeValue::Version);
    bool.map(AttributeValue::Bool)
        .or(int.map(AttributeValue::Int))
        .or(text)
        .or(version)
}

#[cfg(test)]
mod tests;
