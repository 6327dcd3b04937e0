//! Tests of the decisions one by one; `properties` tests sequences of them, and `table` the claim table below them.

mod kubelet;
mod node;
mod properties;
pub(crate) mod requests;
mod retries;
mod table;

use std::sync::Arc;

use super::fixtures::{allocation, claim, driver, permanent, pod, prepared, transient, uid};
use super::machine::*;
use crate::records::table::ClaimTable;
use nodedock_model::{
    Again, Claim, ClaimRecord, ClaimState, Consumer, DriverName, Hold, ObjectRef, PreparedClaim,
    Problem, limit,
};

const BOOT: &str = "boot-1";

fn no_facts(_: &DriverName, _: &str, _: &str) -> DeviceFacts {
    DeviceFacts::default()
}

/// A request of a pod in the boot `BOOT`, where nothing is known of the devices and none has moved.
fn request<'a>(claim: &'a Claim, holder: Holder<'a>) -> PrepareRequest<'a> {
    let (allocation, facts) = (claim.allocation.as_ref().unwrap(), &no_facts);
    PrepareRequest {
        claim,
        allocation,
        holder,
        facts,
        moved: &[],
        boot_id: BOOT,
        now_ms: 1,
    }
}

fn ask(table: &ClaimTable, claim: &Claim, pod: &ObjectRef, boot_id: &str) -> PrepareStep {
    prepare(
        table,
        &PrepareRequest {
            boot_id,
            ..request(claim, Holder::Pod(pod))
        },
    )
}

#[track_caller]
fn called(step: PrepareStep) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    match step {
        PrepareStep::Call { record, drivers } => (record, drivers),
        other => panic!("drivers were to be called: {other:?}"),
    }
}

#[track_caller]
fn waits(step: PrepareStep) -> Problem {
    match step {
        PrepareStep::Wait { at: None, problem } => problem,
        other => panic!("it was to wait: {other:?}"),
    }
}

/// Returns a hold of a claim; an identity is held for the driver `gpu`.
fn hold(key: &str, shared: bool) -> Hold {
    let of = Some(driver("gpu")).filter(|gpu| !key.starts_with(gpu.as_str()));
    Hold {
        key: key.to_owned(),
        shared,
        driver: of,
        derived: false,
        uses: Vec::new(),
    }
}

fn result(driver: &DriverName, outcome: Result<PreparedClaim, Problem>) -> DriverResult {
    DriverResult {
        driver: driver.clone(),
        by: None,
        outcome,
        duration_us: 7,
    }
}

fn done(record: &ClaimRecord, name: &DriverName) -> DriverResult {
    result(
        name,
        Ok(prepared(&record.driver_claim(name).devices, "memo")),
    )
}

/// A claim that is prepared for a pod, in a table.
fn prepared_for(claim: &Claim, pod: &ObjectRef) -> (ClaimTable, Arc<ClaimRecord>) {
    let mut table = ClaimTable::default();
    let (record, drivers) = called(ask(&table, claim, pod, BOOT));
    let results = drivers.iter().map(|name| done(&record, name)).collect();
    let PrepareEnd::Prepared(record) = finish_prepare(&record, None, results, 2) else {
        panic!("all drivers answered")
    };
    table.put(record.clone());
    (table, record)
}

/// A claim that is being unprepared, in a table.
fn unpreparing(claim: &Claim, pod: &ObjectRef) -> ClaimTable {
    let (mut table, record) = prepared_for(claim, pod);
    table.put(roll_back(&record, None, None, 3).0);
    table
}

#[test]
fn admission_refuses_invalid_claims() {
    let (a, b) = (pod("a"), pod("b"));
    let good = claim("one", &["gpu/0"], &[&a]);
    let with = |change: fn(&mut Claim)| {
        let mut claim = good.clone();
        change(&mut claim);
        claim
    };
    fn group(name: &str, api_group: &str) -> Consumer {
        let (api_group, resource) = (api_group.to_owned(), "podgroups".to_owned());
        let uid = uid("uid-of-the-group");
        Consumer {
            api_group,
            resource,
            uid,
            ..Consumer::of_pod(&pod(name))
        }
    }
    // The pod belongs to the group `a`, of which it does not know the UID.
    let reserved = |groups: &[(&str, &str)]| {
        let groups = groups
            .iter()
            .map(|(name, api_group)| group(name, api_group));
        let reserved_for = std::iter::once(Consumer::of_pod(&pod("b")))
            .chain(groups)
            .collect();
        Claim {
            reserved_for,
            ..good.clone()
        }
    };
    let owned = |claim: Claim| Claim {
        owner_pod: Some(uid("uid-a")),
        ..claim
    };
    let (of_another, not_reserved) = (Some("claim-of-another-pod"), Some("claim-not-reserved"));
    let (not_allocated, elsewhere) = (Some("claim-not-allocated"), Some("claim-on-another-node"));
    // The code for a pod, then for a kubelet, which has checked the pods itself.
    let cases = [
        (
            of_another,
            of_another,
            with(|c| c.owner_pod = Some(uid("uid-b"))),
        ),
        (not_allocated, not_allocated, with(|c| c.allocation = None)),
        (
            not_reserved,
            None,
            with(|c| c.reserved_for = vec![Consumer::of_pod(&pod("b"))]),
        ),
        (
            not_reserved,
            None,
            with(|c| (c.reserved_for, c.allocation) = (vec![], Some(allocation(&[])))),
        ),
        (
            not_reserved,
            None,
            claim("some", &["!gpu/0", "gpu/1"], &[&b]),
        ),
        (
            not_reserved,
            None,
            owned(reserved(&[("b", "scheduling.k8s.io")])),
        ),
        (not_reserved, None, reserved(&[("a", "example.com")])),
        (None, None, reserved(&[("a", "scheduling.k8s.io")])),
        // The pod that owns it may be of the group.
        (None, None, owned(reserved(&[("a", "scheduling.k8s.io")]))),
        (not_reserved, of_another, owned(reserved(&[]))),
        (
            elsewhere,
            elsewhere,
            with(|c| c.allocation.as_mut().unwrap().node_name = Some("node-2".to_owned())),
        ),
        (None, None, good.clone()),
        (None, None, with(|c| c.owner_pod = Some(uid("uid-a")))),
        (None, None, claim("all", &["!gpu/0"], &[])),
    ];
    for (for_pod, for_kubelet, claim) in cases {
        for (admitted, code) in [
            (admit(&claim, &a, Some(&a.name), "node-1"), for_pod),
            (admit_for_kubelet(&claim, "node-1"), for_kubelet),
        ] {
            let problem = admitted.err();
            assert_eq!(
                problem.as_ref().map(|problem| problem.code.as_str()),
                code,
                "{claim:?}"
            );
            let is_named = |problem: &Problem| problem.message.contains(&claim.id.to_string());
            assert!(problem.as_ref().is_none_or(is_named), "{problem:?}");
            assert!(code != not_allocated || !problem.unwrap().kind.is_permanent());
        }
    }
}

#[test]
fn claim_holds_devices_and_identities() {
    let facts = |_: &DriverName, _: &str, device: &str| DeviceFacts {
        allow_multiple_allocations: device == "many",
        identity: if device == "0" {
            vec!["pci:1".to_owned()]
        } else {
            Vec::new()
        },
        ..DeviceFacts::default()
    };
    type Case = (&'static [&'static str], &'static [(&'static str, bool)]);
    let cases: [Case; 5] = [
        (
            &["gpu/0"],
            &[("gpu.example.com/pool/0", false), ("pci:1", false)],
        ),
        (&["gpu/1#a"], &[("gpu.example.com/pool/1", true)]),
        (&["gpu/many"], &[("gpu.example.com/pool/many", true)]),
        (&["!gpu/0"], &[]),
        (&["gpu/1#a", "gpu/1"], &[("gpu.example.com/pool/1", false)]),
    ];
    for (devices, wanted) in cases {
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(key, shared)| hold(key, *shared))
            .collect();
        assert_eq!(holds(&allocation(devices), facts), wanted, "{devices:?}");
    }
}

#[test]
fn claim_without_devices_needs_no_driver() {
    let a = pod("a");
    let (_, record) = prepared_for(&claim("none", &[], &[&a]), &a);
    assert_eq!(record.state, ClaimState::Prepared);
}

/// The second reboot overwrote in which boot a memo was written.
#[test]
fn refusal_after_reboot_keeps_earlier_memo() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let (mut table, _) = prepared_for(&wanted, &a);
    table.put(called(ask(&table, &wanted, &a, "boot-2")).0);
    let (record, drivers) = called(ask(&table, &wanted, &a, "boot-3"));
    assert_eq!(drivers.len(), 2);
    for (of_gpu, boot_of_gpu) in [
        (done(&record, &driver("gpu")), "boot-3"),
        (result(&driver("gpu"), Err(permanent())), BOOT),
    ] {
        let results = vec![of_gpu, result(&driver("nic"), Err(permanent()))];
        let end = finish_prepare(&record, None, results, 3);
        let PrepareEnd::Open(record, _) = end else {
            panic!("its pod unprepares it: {end:?}")
        };
        let memo = |name| {
            record
                .driver_record(&driver(name))
                .map(|live| (live.memo, live.boot_id))
                .unwrap()
        };
        assert_eq!(memo("gpu"), (b"memo".to_vec(), boot_of_gpu.to_owned()));
        assert_eq!(memo("nic"), (b"memo".to_vec(), BOOT.to_owned()));
    }
}

#[test]
fn conflicting_claim_is_named() {
    let (a, b) = (pod("a"), pod("b"));
    let one = claim("one", &["gpu/0"], &[&a]);
    let (table, _) = prepared_for(&one, &a);
    let held = waits(ask(
        &table,
        &claim("two", &["nic/0", "gpu/0"], &[&b]),
        &b,
        BOOT,
    ));
    assert_eq!(held.code, "device-held");
    for part in [
        "default/two",
        "gpu.example.com/pool/0",
        "default/one",
        "default/a",
    ] {
        assert!(held.message.contains(part), "{held}");
    }
    let replaced = waits(ask(
        &table,
        &claim("one@uid-new", &["gpu/1"], &[&b]),
        &b,
        BOOT,
    ));
    assert_eq!(replaced.code, "claim-replaced");
    assert!(
        replaced.message.contains("uid-one") && replaced.message.contains("uid-new"),
        "{replaced}"
    );
    assert_eq!(
        waits(ask(&unpreparing(&one, &a), &one, &b, BOOT)).code,
        "claim-unpreparing"
    );
}

#[test]
fn shares_and_admin_access_coexist() {
    let (a, b) = (pod("a"), pod("b"));
    let (table, _) = prepared_for(&claim("one", &["gpu/0#a"], &[&a]), &a);
    for (devices, free) in [
        ("gpu/0#b", true),
        ("!gpu/0", true),
        ("gpu/0", false),
        ("gpu/1", true),
    ] {
        let step = ask(&table, &claim("two", &[devices], &[&b]), &b, BOOT);
        assert_eq!(
            matches!(step, PrepareStep::Call { .. }),
            free,
            "{devices}: {step:?}"
        );
    }
}

/// A claim lost what it shared while its driver was away: the retry for another driver made its device exclusive, and it was
/// refused for a sharer that was there all the time.
#[test]
fn holds_survive_driver_absence() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let shared = |_: &DriverName, _: &str, _: &str| DeviceFacts {
        allow_multiple_allocations: true,
        ..DeviceFacts::default()
    };
    let (request, mut table) = (request(&wanted, Holder::Pod(&a)), ClaimTable::default());
    table.put(
        called(prepare(
            &table,
            &PrepareRequest {
                facts: &shared,
                ..request.clone()
            },
        ))
        .0,
    );
    let (record, _) = called(prepare(&table, &request));
    assert_eq!(
        record.holds,
        holds(wanted.allocation.as_ref().unwrap(), shared)
    );
    assert!(
        record.holds.iter().all(|hold| hold.shared),
        "{:?}",
        record.holds
    );
}

/// A device that was plugged in again has other numbers: what the claim's driver said of it before is void.
#[test]
fn moved_nodes_cause_another_prepare() {
    let a = pod("a");
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let (mut table, before) = prepared_for(&wanted, &a);
    let (record, drivers) = called({
        let moved = &[driver("gpu")];
        prepare(
            &table,
            &PrepareRequest {
                moved,
                ..request(&wanted, Holder::Pod(&a))
            },
        )
    });
    assert_eq!(
        (drivers, record.state),
        (vec![driver("gpu")], ClaimState::Preparing)
    );
    assert!(record.drivers[&driver("gpu")].current().is_none());
    assert_eq!(
        record.drivers[&driver("nic")],
        before.drivers[&driver("nic")]
    );
    let memo = &record.driver_record(&driver("gpu")).unwrap().memo;
    assert_eq!(
        memo.as_slice(),
        b"memo",
        "it is still good for an unprepare"
    );
    let refused = finish_prepare(
        &record,
        None,
        vec![result(&driver("gpu"), Err(permanent()))],
        3,
    );
    let PrepareEnd::Open(record, _) = refused else {
        panic!("the nic stands: {refused:?}")
    };
    table.put(record);
    let (record, drivers) = called(ask(&table, &wanted, &a, BOOT));
    assert_eq!(
        drivers,
        [driver("gpu")],
        "it stays void until the driver prepares it"
    );
    let end = finish_prepare(&record, None, vec![done(&record, &driver("gpu"))], 4);
    assert!(matches!(end, PrepareEnd::Prepared(record) if !record.drivers[&driver("gpu")].stale));
}

#[test]
fn missing_plugin_files_are_noted_once() {
    let a = pod("a");
    let (_, record) = prepared_for(&claim("one", &["gpu/0"], &[&a]), &a);
    assert_eq!(note_files(&record, None, 5), None, "nothing was missing");
    let noted = note_files(&record, Some(transient()), 5).unwrap();
    assert_eq!(noted.timeline.back().unwrap().problem, Some(transient()));
    assert_eq!(note_files(&noted, Some(transient()), 6), None);
    assert!(
        note_files(&noted, Some(permanent()), 6).is_some(),
        "other files are missing"
    );
    let there = note_files(&noted, None, 7).unwrap();
    assert_eq!(there.timeline.back().unwrap().problem, None);
    assert_eq!(note_files(&there, None, 8), None);
}

/// A claim that a driver would not unprepare for a day had a history of nothing else.
#[test]
fn repeated_unprepares_share_one_history_entry() {
    let a = pod("a");
    let table = unpreparing(&claim("one", &["gpu/0", "nic/0"], &[&a]), &a);
    let mut record = table.claim("uid-one").unwrap().clone();
    let before = record.timeline.len();
    let mut attempt = |now_ms, gpu: Problem, nic: Problem| {
        let results = vec![
            (driver("gpu"), Err(gpu), now_ms),
            (driver("nic"), Err(nic), 0),
        ];
        let UnprepareEnd::Stays(kept, Some(_)) = finish_unprepare(&record, results, now_ms) else {
            panic!("it is not unprepared")
        };
        record = kept;
        let entries = record.timeline.iter().skip(before);
        entries
            .map(|entry| (entry.cause.clone(), entry.at_ms, entry.again))
            .collect::<Vec<_>>()
    };
    let other = |words: &str| Problem {
        message: words.to_owned(),
        ..transient()
    };
    attempt(10, transient(), transient());
    for now_ms in 11..100 {
        attempt(now_ms, other("still"), transient());
    }
    let again = |count, last_at_ms| Some(Again { count, last_at_ms });
    let (gpu, nic) = (driver("gpu").to_string(), driver("nic").to_string());
    let entries = attempt(100, other("at last"), permanent());
    let expected = [
        (gpu, 10, again(91, 100)),
        (nic.clone(), 10, again(90, 99)),
        (nic.clone(), 100, None),
    ];
    assert_eq!(entries, expected, "another problem is another entry");
    let entries = attempt(101, transient(), transient());
    assert_eq!(
        entries.last(),
        Some(&(nic, 101, None)),
        "and what came before it is not counted on"
    );
    let last = record
        .timeline
        .iter()
        .find(|entry| entry.again.is_some())
        .unwrap();
    assert_eq!(
        (last.problem.as_ref(), last.duration_us),
        (Some(&transient()), 101),
        "those of the last"
    );
    let json = serde_json::to_value(&record.timeline[0]).unwrap();
    assert_eq!(
        json.get("again"),
        None,
        "what happened once is written as before"
    );
}

#[test]
fn only_untouched_claims_are_rolled_back() {
    let (a, b) = (pod("a"), pod("b"));
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&a, &b]);
    let (record, _) = called(ask(&ClaimTable::default(), &wanted, &a, BOOT));
    let refusal = |short| result(&driver(short), Err(permanent()));
    let two = |nic| vec![refusal("gpu"), result(&driver("nic"), nic)];
    let ok = || Ok(PreparedClaim::default());
    let shared = || {
        let mut shared = ClaimRecord::clone(&record);
        shared.pods.insert(b.uid.clone(), b.clone());
        shared
    };
    let with_kubelet = |pod: Option<&ObjectRef>| {
        let (nic, mut table) = (driver("nic"), ClaimTable::default());
        let given = false;
        let part = called(prepare(
            &table,
            &request(
                &wanted,
                Holder::Kubelet {
                    driver: &nic,
                    given,
                },
            ),
        ))
        .0;
        table.put(part.clone());
        let record = pod.map_or(part, |pod| called(ask(&table, &wanted, pod, BOOT)).0);
        ClaimRecord::clone(&record)
    };
    let nic = &driver("nic");
    let cases = [
        ("rolled back", &record, None, two(Err(permanent()))),
        ("open", &record, None, two(Err(transient()))),
        ("open", &record, None, two(ok())),
        ("open", &record, None, vec![refusal("gpu")]),
        ("open", &shared().into(), None, two(Err(permanent()))),
        (
            "open",
            &with_kubelet(Some(&a)).into(),
            None,
            two(Err(permanent())),
        ),
        (
            "rolled back",
            &with_kubelet(None).into(),
            Some(nic),
            vec![refusal("nic")],
        ),
        (
            "open",
            &with_kubelet(Some(&a)).into(),
            Some(nic),
            vec![refusal("nic")],
        ),
    ];
    for (wanted, record, part, results) in cases {
        let end = match finish_prepare(record, part, results.clone(), 2) {
            PrepareEnd::Prepared(_) => "prepared",
            PrepareEnd::Open(_, problem) => {
                assert_eq!(problem, permanent(), "one that does not pass comes first");
                "open"
            }
            PrepareEnd::RolledBack(..) => "rolled back",
        };
        assert_eq!(end, wanted, "{part:?}: {results:?}");
    }
}

#[test]
fn claim_history_keeps_newest_entries() {
    let (a, b) = (pod("a"), pod("b"));
    let wanted = claim("one", &["gpu/0"], &[&a, &b]);
    let (mut table, _) = prepared_for(&wanted, &a);
    for _ in 0..limit::TIMELINE_MAX {
        let PrepareStep::Known { record, .. } = ask(&table, &wanted, &b, BOOT) else {
            panic!("b joins")
        };
        table.put(record);
        let step = unprepare(&table, &wanted.id.uid, UnprepareRequest::Pod(&b.uid), 9);
        let UnprepareStep::Left(record) = step else {
            panic!("b leaves: {step:?}")
        };
        table.put(record);
    }
    let timeline = &table.claim("uid-one").unwrap().timeline;
    assert_eq!(timeline.len(), limit::TIMELINE_MAX);
    assert_eq!(timeline.back().map(|last| last.what.as_str()), Some("left"));
}
