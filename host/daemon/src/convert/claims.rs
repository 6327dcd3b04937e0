//! Converts claims to messages: prepared ones with their retry status, refused and released ones.

use nodedock_proto::node::v1;

use super::{consumer_message, missing, name, object_message, optional, problem};
use nodedock_core::manager::claims::gone_devices::GoneDevices;
use nodedock_core::manager::claims::{
    ClaimView, RefusedClaim, ReleasePreview, ReleaseRequest, Retry,
};
use nodedock_core::pools::NodePools;
use nodedock_kube::local::{Excluded, NotAllocatedKind, WaitingClaim};
use nodedock_model::{
    Caller, ClaimRecord, DriverName, DriverPart, EndedRecord, Problem, PutBack, ReleaseRecord,
    Transition,
};

pub(super) fn worst_problem(claim: &ClaimRecord) -> Option<v1::Problem> {
    claim
        .drivers
        .values()
        .find_map(|part| part.problem.as_ref())
        .map(problem)
}

/// `pools` names the pools as the API does, here and below.
pub fn claim_status(
    view: &ClaimView,
    pools: &NodePools,
    gone: &GoneDevices,
    boot_id: &str,
    with_timeline: bool,
) -> v1::ClaimStatus {
    let claim = &view.record;
    v1::ClaimStatus {
        id: Some(object_message(&claim.id)),
        state: claim.state.as_str().to_owned(),
        pods: claim.pods.values().map(object_message).collect(),
        drivers: claim
            .drivers
            .iter()
            .map(|(name, part)| claim_driver(view, pools, gone, name, part))
            .collect(),
        timeline: if with_timeline {
            claim.timeline.iter().map(transition).collect()
        } else {
            Vec::new()
        },
        stale_boot: claim.boot_id != boot_id,
        problem: worst_problem(claim),
        values: if with_timeline {
            changed_values(view)
        } else {
            Vec::new()
        },
        kubelet: kubelet_hold(claim),
    }
}

fn kubelet_hold(claim: &ClaimRecord) -> Option<v1::KubeletHold> {
    let drivers: Vec<_> = claim.kubelet_drivers().map(ToString::to_string).collect();
    let hold = claim.kubelet.as_ref().filter(|_| !drivers.is_empty())?;
    Some(v1::KubeletHold {
        since_ms: hold.since_ms,
        drivers,
        consumers: hold.consumers.iter().map(consumer_message).collect(),
    })
}

fn claim_driver(
    view: &ClaimView,
    pools: &NodePools,
    gone: &GoneDevices,
    name: &DriverName,
    part: &DriverPart,
) -> v1::ClaimDriver {
    let claim = &view.record;
    let status = view.retries.iter().find(|status| status.driver == *name);
    let state = match part.current() {
        _ if claim.is_part_leaving(name) => "unpreparing",
        Some(_) => "prepared",
        None if part.problem.is_some() => "refused",
        None => "preparing",
    };
    let by = part.by.as_ref();
    v1::ClaimDriver {
        driver: name.to_string(),
        state: state.to_owned(),
        devices: pools.devices_of(claim, name),
        gone_devices: claim
            .allocation
            .of_driver(name)
            .filter(|device| gone.has(device))
            .map(|device| pools.device_of(claim, device))
            .collect(),
        cdi_devices: part
            .current()
            .map(|_| cdi_names(claim, name))
            .unwrap_or_default(),
        version: by.map(|by| by.version.clone()).unwrap_or_default(),
        digest: by.map(|by| by.digest.clone()).unwrap_or_default(),
        problem: part.problem.as_ref().map(problem),
        attempts: status.map_or(0, |status| status.attempts),
        retry: status.map(|status| retry(status.retry)),
    }
}

fn retry(retry: Retry) -> v1::Retry {
    v1::Retry {
        when: retry.as_str().to_owned(),
        at_ms: retry.at_ms(),
    }
}

pub fn refused_claim(refused: &RefusedClaim) -> v1::RefusedClaim {
    v1::RefusedClaim {
        id: Some(object_message(&refused.claim)),
        driver: refused.retry.driver.to_string(),
        problem: Some(problem(&refused.problem)),
        attempts: refused.retry.attempts,
        at_ms: refused.at_ms,
        retry: Some(retry(refused.retry.retry)),
    }
}

/// Converts a claim with its place among those that wait, from 1.
pub fn waiting_claim(place: u32, claim: WaitingClaim) -> v1::WaitingClaim {
    let excluded = claim.why.devices.iter();
    let excluded = excluded.map(|device| excluded_device(&claim, device));
    let excluded = excluded.collect();
    let WaitingClaim {
        id, why, holders, ..
    } = claim;
    v1::WaitingClaim {
        id: Some(object_message(&id)),
        place,
        holders,
        never: matches!(
            why.kind,
            NotAllocatedKind::Invalid | NotAllocatedKind::Never
        ),
        reason: why.message.clone(),
        excluded,
        more: why.more,
    }
}

fn excluded_device(claim: &WaitingClaim, excluded: &Excluded) -> v1::ExcludedDevice {
    v1::ExcludedDevice {
        request: excluded.request.clone(),
        driver: excluded.driver.clone(),
        pool: excluded.pool.clone(),
        device: excluded.device.clone(),
        reason: claim.reason(excluded),
    }
}

pub fn released_claim(released: &ReleaseRecord, pools: &NodePools) -> v1::ReleasedClaim {
    let Caller { uid, user, pid } = released.by.clone();
    v1::ReleasedClaim {
        id: Some(object_message(&released.id)),
        at_ms: released.at_ms,
        by: Some(v1::Caller {
            uid,
            user: user.unwrap_or_default(),
            pid,
        }),
        pods: released.pods.values().map(object_message).collect(),
        untold: not_unprepared(released, pools),
        timeline: released.timeline.iter().map(transition).collect(),
        values: released.put_back.iter().map(restored_value).collect(),
    }
}

pub fn ended_claim(ended: &EndedRecord, pools: &NodePools) -> v1::EndedClaim {
    let devices = ended.devices.iter().flat_map(|(driver, devices)| {
        let published = move |device| pools.published_device(driver, device);
        devices
            .iter()
            .map(move |device| format!("{driver}/{}", published(device)))
    });
    v1::EndedClaim {
        id: Some(object_message(&ended.id)),
        at_ms: ended.at_ms,
        pods: ended.pods.values().map(object_message).collect(),
        devices: devices.collect(),
        timeline: ended.timeline.iter().map(transition).collect(),
    }
}

fn not_unprepared(released: &ReleaseRecord, pools: &NodePools) -> Vec<v1::UntoldDriver> {
    released
        .untold
        .iter()
        .map(|(driver, untold)| v1::UntoldDriver {
            driver: driver.to_string(),
            devices: untold
                .devices
                .iter()
                .map(|device| pools.published_device(driver, device))
                .collect(),
            problem: Some(problem(&untold.problem)),
        })
        .collect()
}

/// Selects the claim to release by namespace and name, and by UID if there is one.
pub fn release_request(
    claim: Option<&v1::ObjectRef>,
    by: Caller,
) -> Result<ReleaseRequest, Problem> {
    let claim = claim.ok_or_else(|| missing("claim"))?;
    Ok(ReleaseRequest {
        namespace: name("claim.namespace", &claim.namespace)?,
        name: name("claim.name", &claim.name)?,
        uid: optional("claim.uid", &claim.uid)?,
        by,
    })
}

pub fn release_preview(preview: &ReleasePreview, pools: &NodePools) -> v1::ReleaseClaimResponse {
    let ReleasePreview {
        record,
        drivers,
        values,
    } = preview;
    v1::ReleaseClaimResponse {
        claim: Some(object_message(&record.id)),
        state: record.state.as_str().to_owned(),
        pods: record.pods.values().map(object_message).collect(),
        drivers: drivers
            .iter()
            .map(|(name, serves)| v1::UntoldDriver {
                driver: name.to_string(),
                devices: pools.devices_of(record, name),
                problem: serves.as_ref().err().map(problem),
            })
            .collect(),
        values: values.iter().map(restored_value).collect(),
    }
}

pub fn release_response(released: &ReleaseRecord, pools: &NodePools) -> v1::ReleaseClaimResponse {
    v1::ReleaseClaimResponse {
        claim: Some(object_message(&released.id)),
        state: String::new(),
        pods: released.pods.values().map(object_message).collect(),
        drivers: not_unprepared(released, pools),
        values: released.put_back.iter().map(restored_value).collect(),
    }
}

fn cdi_names(claim: &ClaimRecord, driver: &DriverName) -> Vec<String> {
    nodedock_core::cdi::cdi_devices(claim, driver)
        .into_iter()
        .flat_map(|(_, names)| names)
        .collect()
}

pub(super) fn transition(transition: &Transition) -> v1::Transition {
    v1::Transition {
        at_ms: transition.at_ms,
        what: transition.what.clone(),
        cause: transition.cause.clone(),
        duration_us: transition.duration_us,
        problem: transition.problem.as_ref().map(problem),
        again: transition.again.map(|again| v1::Again {
            count: again.count,
            last_at_ms: again.last_at_ms,
        }),
    }
}

/// Returns the values below `/sys` that a claim's drivers changed, in the order in which the host would restore them.
fn changed_values(view: &ClaimView) -> Vec<v1::SysfsValue> {
    let changed = view.values.iter().flat_map(|values| values.newest_first());
    changed
        .map(|(driver, kept)| v1::SysfsValue {
            driver: driver.to_string(),
            path: kept.path.clone(),
            before: kept.before.clone(),
            left: kept.left().map(str::to_owned),
            ..v1::SysfsValue::default()
        })
        .collect()
}

fn restored_value(value: &PutBack) -> v1::SysfsValue {
    v1::SysfsValue {
        driver: value.driver.to_string(),
        path: value.path.clone(),
        before: value.before.clone(),
        left: None,
        found: value.found.clone(),
        end: value.end.as_str().to_owned(),
        problem: value.problem.as_ref().map(problem),
    }
}
