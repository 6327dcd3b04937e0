//! Decisions about claims that a kubelet holds. It names no pods, and prepares and unprepares each driver's part by itself.

use std::sync::Arc;

use super::{
    PODS_NAMED_MAX, UnprepareStep, allocated, check_node, not_called, pods_named, settle,
    transition,
};
use crate::manager::claims::name_few;
use nodedock_model::{
    Allocation, Claim, ClaimRecord, ClaimState, DriverName, ObjectRef, Problem, ProblemCode,
    ProblemKind,
};

/// Checks of a claim that need nothing but the claim and the node. The kubelet has checked which pods it is reserved for; without the pod it
/// can be checked that a claim made from a template goes to its own pod, unless it is reserved for more than pods: the pod may be of a group.
pub fn admit_for_kubelet<'a>(claim: &'a Claim, node_name: &str) -> Result<&'a Allocation, Problem> {
    let allocation = allocated(claim)?;
    check_node(claim, allocation, node_name)?;
    let (consumers, owner) = (&claim.reserved_for, claim.owner_pod.as_ref());
    if let Some(owner) = owner.filter(|_| !consumers.is_empty())
        && consumers
            .iter()
            .all(|consumer| consumer.is_pod() && consumer.uid != *owner)
    {
        let message = format!(
            "claim {} was made for the pod with UID {owner}, and is reserved for others only",
            claim.id
        );
        return Err(Problem::denied(ProblemCode::ClaimOfAnotherPod, message));
    }
    Ok(allocation)
}

/// The claim of the last request, if its source cannot be read: an allocation is final. Fails with the source's problem if the claim has no
/// record here, or if the source could be read.
pub fn known_claim(
    known: Option<&ClaimRecord>,
    wanted: &ObjectRef,
    source: Problem,
) -> Result<Claim, Problem> {
    let is_unreachable = matches!(
        source.kind,
        ProblemKind::Unavailable | ProblemKind::Internal | ProblemKind::Denied
    );
    let Some(record) = known
        .filter(|record| record.id == *wanted && record.state != ClaimState::Unpreparing)
        .filter(|_| is_unreachable)
    else {
        return Err(source);
    };
    Ok(Claim {
        id: record.id.clone(),
        allocation: Some(record.allocation.clone()),
        reserved_for: record
            .kubelet
            .as_ref()
            .map(|held| held.consumers.clone())
            .unwrap_or_default(),
        annotations: record.annotations.clone(),
        owner_pod: None,
        resource: None,
    })
}

/// Decides an unprepare by a kubelet: of one driver's part, or (`driver` none) of every part that it uses.
pub(super) fn unprepare(
    known: &Arc<ClaimRecord>,
    driver: Option<&DriverName>,
    now_ms: u64,
    cause: &str,
) -> UnprepareStep {
    let drivers: Vec<DriverName> = match driver {
        Some(driver) => known
            .drivers
            .keys()
            .filter(|of| *of == driver)
            .cloned()
            .collect(),
        None => known.kubelet_drivers().cloned().collect(),
    };
    let (again, drivers): (Vec<_>, Vec<_>) = drivers
        .into_iter()
        .partition(|driver| known.is_part_leaving(driver));
    if !again.is_empty() {
        return UnprepareStep::Call {
            record: known.clone(),
            drivers: again,
        };
    }
    let mut record = ClaimRecord::clone(known);
    if !record.pods.is_empty() {
        // The pods hold every part.
        let mut was_used = false;
        for (_, part) in record
            .drivers
            .iter_mut()
            .filter(|(driver, _)| drivers.contains(driver))
        {
            was_used |= std::mem::take(&mut part.kubelet);
        }
        if !was_used {
            return UnprepareStep::Nothing;
        }
        if !record.is_held_by_kubelet() {
            record.kubelet = None;
        }
        record.note(transition(now_ms, "left", cause));
        return UnprepareStep::Left(Arc::new(record));
    }
    if drivers.is_empty() {
        return UnprepareStep::Nothing;
    }
    let named: Vec<_> = drivers.iter().map(DriverName::as_str).collect();
    record.note(transition(
        now_ms,
        "unpreparing",
        &format!("{cause}, {}", named.join(", ")),
    ));
    release_parts(&mut record, &drivers);
    UnprepareStep::Call {
        record: Arc::new(record),
        drivers,
    }
}

/// Marks parts that have no users any more, and the claim if none has.
pub(super) fn release_parts(record: &mut ClaimRecord, drivers: &[DriverName]) {
    for driver in drivers {
        if let Some(part) = record.drivers.get_mut(driver) {
            (part.kubelet, part.leaving) = (false, true);
        }
    }
    if record.pods.is_empty() && !record.is_held_by_kubelet() {
        record.state = ClaimState::Unpreparing;
    } else {
        settle(record);
    }
}

/// The answer to a kubelet that unprepared a driver's part, if some of the claim is left.
pub fn end_of_part(record: &ClaimRecord, driver: &DriverName) -> Result<(), Problem> {
    let left = record.drivers.get(driver);
    left.map_or(Ok(()), |part| {
        Err(part.problem.clone().unwrap_or_else(not_called))
    })
}

pub(super) fn in_use(record: &ClaimRecord) -> Problem {
    let advice = match record.is_held_by_kubelet() {
        true if record.is_held_early() => "it is unprepared when no pod waits for it any more",
        true => "a kubelet unprepares it when their pods are gone",
        false => "use `nodedock unprepare`, which calls its drivers",
    };
    let message = format!(
        "claim {} (UID {}) is {} and held by {}: {advice}",
        record.id,
        record.id.uid,
        record.state.as_str(),
        holders_named(record)
    );
    Problem::conflict(ProblemCode::ClaimInUse, message)
}

/// Names the holders of a claim, for a problem's one line.
pub(super) fn holders_named(record: &ClaimRecord) -> String {
    let pods = pods_named(record);
    if !record.is_held_by_kubelet() {
        return format!("pods {pods}");
    }
    let consumers = record
        .kubelet
        .as_ref()
        .map(|held| held.consumers.as_slice())
        .unwrap_or_default();
    let kubelet = match name_few(consumers.iter().map(|one| &one.name), PODS_NAMED_MAX) {
        named if named.is_empty() => "the kubelet".to_owned(),
        named => format!("the kubelet for {named}"),
    };
    if record.pods.is_empty() {
        kubelet
    } else {
        format!("{kubelet}, and pods {pods}")
    }
}
