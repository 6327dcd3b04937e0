//! Pods, as far as their claims go: what is prepared for whom, in the order and with the checks of a kubelet.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::dra::{self, ClaimRef, PreparedDevice};
use super::state::{Inner, State};

/// A claim that is prepared, or may be.
#[derive(Clone, Debug)]
pub(super) struct CachedClaim {
    pub(super) claim: ClaimRef,
    /// By UID.
    pub(super) pods: BTreeSet<String>,
    pub(super) drivers: BTreeMap<String, Vec<PreparedDevice>>,
    /// Not known any more after a restart.
    pub(super) prepared: bool,
}

/// A claim of a pod, as the API server has it.
struct Wanted {
    /// As containers name it.
    pod_claim: String,
    claim: ClaimRef,
    drivers: BTreeSet<String>,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

pub(super) async fn run(inner: &Inner, pod: &Value) -> Result<BTreeMap<String, Vec<String>>, String> {
    let wanted = wanted(inner, pod).map_err(|why| format!("prepare dynamic resources: {why}"))?;
    prepare(inner, &text(&pod["metadata"]["uid"]), &wanted)
        .await
        .map_err(|why| format!("prepare dynamic resources: {why}"))?;
    Ok(inner.look(|state| containers(state, pod, &wanted)))
}

/// The claims of a pod, after every check that needs no lock.
fn wanted(inner: &Inner, pod: &Value) -> Result<Vec<Wanted>, String> {
    let metadata = &pod["metadata"];
    let (namespace, name, uid) =
        (text(&metadata["namespace"]), text(&metadata["name"]), text(&metadata["uid"]));
    let read = inner.options.claims.as_ref().ok_or("this kubelet reads no claims")?;
    let mut wanted = vec![];
    for (pod_claim, claim_name, from_template) in names(pod)? {
        let Some(claim_name) = claim_name else { continue };
        let claim = read(&namespace, &claim_name)
            .ok_or_else(|| format!("fetch ResourceClaim {claim_name}: not found"))?;
        let claim_uid = text(&claim["metadata"]["uid"]);
        let owned = list(&claim["metadata"]["ownerReferences"])
            .iter()
            .any(|owner| owner["controller"] == true && owner["uid"] == *uid);
        if from_template && !owned {
            return Err(format!(
                "ResourceClaim {namespace}/{claim_name} was not created for Pod {namespace}/{name} (Pod is not owner)"
            ));
        }
        if !list(&claim["status"]["reservedFor"]).iter().any(|pod| pod["uid"] == *uid) {
            return Err(format!(
                "pod {name} ({uid}) is not allowed to use ResourceClaim {claim_name} ({claim_uid})"
            ));
        }
        let allocation = &claim["status"]["allocation"];
        if allocation.is_null() {
            return Err(format!("ResourceClaim {claim_name}: not allocated"));
        }
        let results = list(&allocation["devices"]["results"]).iter();
        let drivers: BTreeSet<String> = results.map(|result| text(&result["driver"])).collect();
        let missing =
            |driver: &&String| inner.look(|state| state.instances.get(*driver).is_none_or(Vec::is_empty));
        if let Some(driver) = drivers.iter().find(missing) {
            return Err(format!("DRA driver {driver} is not registered"));
        }
        wanted.push(Wanted { pod_claim, claim: ClaimRef::new(&namespace, &claim_name, &claim_uid), drivers });
    }
    Ok(wanted)
}

/// The name in the pod, the claim's name if it needs one, and whether it is made from a template.
type Name = (String, Option<String>, bool);

fn names(pod: &Value) -> Result<Vec<Name>, String> {
    let (namespace, name) = (text(&pod["metadata"]["namespace"]), text(&pod["metadata"]["name"]));
    let mut names = vec![];
    for claim in list(&pod["spec"]["resourceClaims"]) {
        let pod_claim = text(&claim["name"]);
        if let Some(claim_name) = claim["resourceClaimName"].as_str() {
            names.push((pod_claim, Some(claim_name.to_owned()), false));
        } else if claim["resourceClaimTemplateName"].is_string() {
            let statuses = list(&pod["status"]["resourceClaimStatuses"]).iter();
            let status = statuses.into_iter().find(|status| status["name"] == *pod_claim);
            let status =
                status.ok_or_else(|| format!("pod \"{namespace}/{name}\": ResourceClaim not created yet"))?;
            names.push((pod_claim, status["resourceClaimName"].as_str().map(str::to_owned), true));
        } else {
            return Err(format!("pod \"{namespace}/{name}\": none of the supported fields are set"));
        }
    }
    if let Some(claim) = pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"].as_str() {
        names.push((String::new(), Some(claim.to_owned()), false));
    }
    Ok(names)
}

fn key(claim: &ClaimRef) -> (String, String) {
    (claim.namespace.clone(), claim.name.clone())
}

async fn prepare(inner: &Inner, pod: &str, wanted: &[Wanted]) -> Result<(), String> {
    // What may be prepared is remembered before any driver is called.
    let batches = inner.change(|state| remember(state, pod, wanted))?;
    for (driver, claims) in &batches {
        let devices = dra::prepare(inner, driver, claims).await?;
        inner.change(|state| {
            for claim in claims {
                let cached = state.claims.get_mut(&key(claim)).ok_or_else(|| {
                    format!(
                        "internal error: unable to get claim info for ResourceClaim {} in namespace {}",
                        claim.name, claim.namespace
                    )
                })?;
                let found = devices.get(&claim.uid).cloned().unwrap_or_default();
                cached.drivers.insert(driver.clone(), found);
            }
            Ok::<_, String>(())
        })?;
    }
    inner.change(|state| {
        for one in wanted {
            if let Some(cached) = state.claims.get_mut(&key(&one.claim)) {
                cached.prepared = true;
            }
        }
    });
    Ok(())
}

/// What is to be called for, by driver.
type Batches = BTreeMap<String, Vec<ClaimRef>>;

fn remember(state: &mut State, pod: &str, wanted: &[Wanted]) -> Result<Batches, String> {
    let mut batches = Batches::new();
    for one in wanted {
        let fresh = CachedClaim {
            claim: one.claim.clone(),
            pods: BTreeSet::new(),
            drivers: one.drivers.iter().map(|driver| (driver.clone(), vec![])).collect(),
            prepared: false,
        };
        let cached = state.claims.entry(key(&one.claim)).or_insert(fresh);
        if cached.claim.uid != one.claim.uid {
            return Err(format!(
                "old ResourceClaim with same name {} and different UID {} still exists (previous pod force-deleted?!)",
                one.claim.name, cached.claim.uid
            ));
        }
        cached.pods.insert(pod.to_owned());
        if !cached.prepared {
            for driver in &one.drivers {
                batches.entry(driver.clone()).or_default().push(one.claim.clone());
            }
        }
    }
    Ok(batches)
}

/// The CDI devices of each container.
fn containers(state: &State, pod: &Value, wanted: &[Wanted]) -> BTreeMap<String, Vec<String>> {
    let containers = list(&pod["spec"]["initContainers"]).iter().chain(list(&pod["spec"]["containers"]));
    let mut found = BTreeMap::new();
    for container in containers {
        let mut uses: Vec<(String, String)> = list(&container["resources"]["claims"])
            .iter()
            .map(|used| (text(&used["name"]), text(&used["request"])))
            .collect();
        for mapping in list(&pod["status"]["extendedResourceClaimStatus"]["requestMappings"]) {
            if mapping["containerName"] == container["name"] {
                uses.push((String::new(), text(&mapping["requestName"])));
            }
        }
        let mut cdi = vec![];
        for (pod_claim, request) in uses {
            let Some(one) = wanted.iter().find(|one| one.pod_claim == pod_claim) else { continue };
            let Some(cached) = state.claims.get(&key(&one.claim)) else { continue };
            let devices = cached.drivers.values().flatten().filter(|device| {
                request.is_empty() || device.requests.is_empty() || device.requests.contains(&request)
            });
            cdi.extend(devices.flat_map(|device| device.cdi.clone()));
        }
        found.insert(text(&container["name"]), cdi);
    }
    found
}

pub(super) async fn stop(inner: &Inner, pod: &str) -> Result<(), String> {
    let batches = inner.change(|state| {
        let mut batches = Batches::new();
        for cached in state.claims.values_mut().filter(|cached| cached.pods.contains(pod)) {
            if cached.pods.len() > 1 {
                cached.pods.remove(pod);
                continue;
            }
            for driver in cached.drivers.keys() {
                batches.entry(driver.clone()).or_default().push(cached.claim.clone());
            }
        }
        batches
    });
    for (driver, claims) in &batches {
        let done = dra::unprepare(inner, driver, claims).await;
        done.map_err(|why| format!("unprepare dynamic resources: {why}"))?;
    }
    inner.change(|state| state.claims.retain(|_, cached| !cached.pods.contains(pod)));
    Ok(())
}
