//! Decisions where a kubelet holds claims, one by one.

use super::*;
use nodedock_model::KubeletHold;

fn facts(_: &DriverName, _: &str, device: &str) -> DeviceFacts {
    DeviceFacts {
        allow_multiple_allocations: device == "many",
        ..DeviceFacts::default()
    }
}

/// Decides a kubelet's request for a driver's part.
fn ask_part(table: &ClaimTable, claim: &Claim, short: &str) -> PrepareStep {
    let holder = Holder::Kubelet {
        driver: &driver(short),
        given: false,
    };
    prepare(
        table,
        &PrepareRequest {
            facts: &facts,
            now_ms: 9,
            ..request(claim, holder)
        },
    )
}

/// A table with parts of a claim prepared for a kubelet.
fn held(claim: &Claim, drivers: &[&str]) -> ClaimTable {
    let mut table = ClaimTable::default();
    for short in drivers {
        take_part(&mut table, claim, short);
    }
    table
}

fn take_part(table: &mut ClaimTable, claim: &Claim, short: &str) {
    let (record, drivers) = called(ask_part(table, claim, short));
    assert_eq!(drivers, [driver(short)]);
    table.put(record.clone());
    let end = finish_prepare(
        &record,
        Some(&driver(short)),
        vec![done(&record, &driver(short))],
        2,
    );
    let PrepareEnd::Prepared(record) = end else {
        panic!("its driver answered: {end:?}")
    };
    table.put(record);
}

fn leave_part(table: &ClaimTable, claim: &Claim, short: &str) -> UnprepareStep {
    let by = UnprepareRequest::Kubelet {
        driver: Some(&driver(short)),
        cause: "kubelet",
    };
    unprepare(table, &claim.id.uid, by, 5)
}

#[track_caller]
fn unprepares(step: UnprepareStep) -> (Arc<ClaimRecord>, Vec<DriverName>) {
    match step {
        UnprepareStep::Call { record, drivers } => (record, drivers),
        other => panic!("drivers were to be called: {other:?}"),
    }
}

#[test]
fn known_claim_serves_without_its_source() {
    let wanted = claim("one", &["gpu/0"], &[&pod("a")]);
    let table = held(&wanted, &["gpu"]);
    let record = table
        .claim("uid-one")
        .map(|record| ClaimRecord::clone(record))
        .unwrap();
    let leaving = ClaimRecord {
        state: ClaimState::Unpreparing,
        ..record.clone()
    };
    let other = claim("one@uid-newer", &[], &[]).id;
    let away = [
        transient(),
        Problem::internal("a", "html"),
        Problem::denied("b", "no token"),
    ];
    for problem in away {
        let known = known_claim(Some(&record), &wanted.id, problem.clone());
        assert_eq!(known, Ok(wanted.clone()));
        for (known, asked) in [
            (None, &wanted.id),
            (Some(&leaving), &wanted.id),
            (Some(&record), &other),
        ] {
            assert_eq!(
                known_claim(known, asked, problem.clone()),
                Err(problem.clone())
            );
        }
    }
    for says in [
        Problem::not_found("a", "gone"),
        Problem::conflict("b", "replaced"),
        permanent(),
    ] {
        assert_eq!(
            known_claim(Some(&record), &wanted.id, says.clone()),
            Err(says)
        );
    }
}

#[test]
fn kubelet_prepares_claims_driver_by_driver() {
    let wanted = claim("one", &["gpu/0", "nic/many"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu"]);
    let record = table.claim("uid-one").unwrap().clone();
    assert_eq!(
        (record.state, record.drivers.len()),
        (ClaimState::Prepared, 1),
        "the nic was not requested"
    );
    let hold = KubeletHold {
        since_ms: 9,
        consumers: wanted.reserved_for.clone(),
        given: false,
        early: false,
    };
    assert_eq!(record.kubelet, Some(hold));
    let keys = |record: &ClaimRecord| {
        record
            .holds
            .iter()
            .map(|hold| hold.key.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(keys(&record), ["gpu.example.com/pool/0"]);
    take_part(&mut table, &wanted, "nic");
    let record = table.claim("uid-one").unwrap().clone();
    assert_eq!(record.kubelet_drivers().count(), 2);
    assert_eq!(
        keys(&record),
        ["gpu.example.com/pool/0", "nic.example.com/pool/many"]
    );
    assert_eq!(
        record
            .holds
            .iter()
            .map(|hold| hold.shared)
            .collect::<Vec<_>>(),
        [false, true]
    );
    for short in ["gpu", "nic"] {
        let step = ask_part(&table, &wanted, short);
        assert_eq!(
            step,
            PrepareStep::Known {
                record: record.clone(),
                changed: false
            }
        );
    }
    let reserved = claim("one", &["gpu/0", "nic/many"], &[&pod("a"), &pod("b")]);
    let PrepareStep::Known {
        record: more,
        changed: true,
    } = ask_part(&table, &reserved, "gpu")
    else {
        panic!("another pod is new")
    };
    assert_eq!(more.kubelet.as_ref().unwrap().consumers.len(), 2);
    assert_eq!(more.timeline, record.timeline, "which is no event");
}

#[test]
fn other_drivers_failure_is_ignored() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let mut table = held(&wanted, &[]);
    let (record, _) = called(ask_part(&table, &wanted, "nic"));
    let end = finish_prepare(
        &record,
        Some(&driver("nic")),
        vec![result(&driver("nic"), Err(transient()))],
        2,
    );
    let PrepareEnd::Open(record, _) = end else {
        panic!("it may come: {end:?}")
    };
    table.put(record);
    take_part(&mut table, &wanted, "gpu");
    let record = table.claim("uid-one").unwrap();
    assert_eq!(record.state, ClaimState::Preparing, "the nic is open");
    assert!(matches!(
        ask_part(&table, &wanted, "gpu"),
        PrepareStep::Known { changed: false, .. }
    ));
    let (_, drivers) = called(ask_part(&table, &wanted, "nic"));
    assert_eq!(drivers, [driver("nic")]);
}

/// A CDI file that was written while no pod and no kubelet used the claim names no user.
#[test]
fn kubelet_unprepares_claim_without_known_holder() {
    let wanted = claim("one", &["gpu/0"], &[&pod("a")]);
    let mut table = held(&wanted, &["gpu"]);
    let mut record = ClaimRecord::clone(table.claim("uid-one").unwrap());
    record.kubelet = None;
    record
        .drivers
        .values_mut()
        .for_each(|part| part.kubelet = false);
    table.put(Arc::new(record));
    assert_eq!(
        unprepares(leave_part(&table, &wanted, "gpu")).0.state,
        ClaimState::Unpreparing
    );
}

/// CDI files tell of their own driver's devices, and neither of configs nor of the node.
#[test]
fn source_completes_a_rebuilt_claim() {
    let a = pod("a");
    let mut wanted = claim("one", &["gpu/0", "nic/0"], &[&a]);
    let rebuilt = held(&claim("one", &["gpu/0"], &[&a]), &["gpu"]);
    wanted.allocation.as_mut().unwrap().node_name = Some("node-1".to_owned());
    let PrepareStep::Known {
        record,
        changed: true,
    } = ask_part(&rebuilt, &wanted, "gpu")
    else {
        panic!("the gpu is there")
    };
    assert_eq!(Some(&record.allocation), wanted.allocation.as_ref());
    let (record, drivers) = called(ask(&rebuilt, &wanted, &a, BOOT));
    assert_eq!((drivers, record.drivers.len()), (vec![driver("nic")], 2));
    assert_eq!(record.holds.len(), 2);
    for other in [&["gpu/1", "nic/0"][..], &["gpu/0", "gpu/1"], &["nic/0"]] {
        let step = ask_part(&rebuilt, &claim("one", other, &[&a]), "gpu");
        assert!(
            matches!(step, PrepareStep::Refuse(_)),
            "{other:?}: {step:?}"
        );
    }
    let complete = held(&wanted, &["gpu"]);
    let step = ask_part(&complete, &claim("one", &["gpu/0", "nic/0"], &[&a]), "gpu");
    assert!(
        matches!(step, PrepareStep::Refuse(_)),
        "what is known is not taken back: {step:?}"
    );
}

/// A kubelet asked for one part after a boot while the other's driver was away, and the claim held the other's hardware no more.
#[test]
fn holds_of_absent_driver_survive_reboot() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let ask = |table: &ClaimTable, short: &str, boot_id: &str, pci: Option<&str>| {
        let facts = |_: &DriverName, _: &str, _: &str| DeviceFacts {
            identity: pci.into_iter().map(str::to_owned).collect(),
            ..DeviceFacts::default()
        };
        let holder = Holder::Kubelet {
            driver: &driver(short),
            given: false,
        };
        called(prepare(
            table,
            &PrepareRequest {
                facts: &facts,
                boot_id,
                ..request(&wanted, holder)
            },
        ))
        .0
    };
    let held = |record: &ClaimRecord| {
        let identities = record.holds.iter().filter(|hold| hold.driver.is_some());
        let mut keys: Vec<_> = identities.map(|hold| hold.key.clone()).collect();
        keys.sort();
        keys
    };
    let mut table = ClaimTable::default();
    table.put(ask(&table, "gpu", BOOT, Some("pci:gpu")));
    table.put(ask(&table, "nic", BOOT, Some("pci:nic")));
    let after = ask(&table, "gpu", "boot-2", Some("pci:gpu-moved"));
    assert_eq!(held(&after), ["pci:gpu-moved", "pci:nic"]);
    table.put(after);
    let again = ask(&table, "gpu", "boot-2", None);
    assert_eq!(
        held(&again),
        ["pci:gpu-moved", "pci:nic"],
        "in one boot it stays"
    );
    let last = ask(&table, "nic", "boot-2", Some("pci:nic-moved"));
    assert_eq!(held(&last), ["pci:gpu-moved", "pci:nic-moved"]);
}

#[test]
fn refusal_names_holders_of_claim() {
    let pods: Vec<_> = (0..5).map(|n| pod(&format!("p{n}"))).collect();
    let wanted = claim("one", &["gpu/0"], &pods.iter().collect::<Vec<_>>());
    let table = held(&wanted, &["gpu"]);
    let problem = waits(ask_part(&table, &claim("two", &["gpu/0"], &[]), "gpu"));
    assert_eq!(problem.code, "device-held");
    assert!(
        problem
            .message
            .contains("(UID uid-one, the kubelet for p0, p1, p2, and 2 more) holds"),
        "{problem}"
    );
    let in_use = check_release(table.claim("uid-one").unwrap()).unwrap_err();
    assert!(
        in_use.code == "claim-in-use" && in_use.message.contains("the kubelet for p0"),
        "{in_use}"
    );
    let (leaving, _) = unprepares(leave_part(&table, &wanted, "gpu"));
    assert_eq!(check_release(&leaving), Ok(()));
    let (mut of_pods, _) = prepared_for(&wanted, &pods[0]);
    for pod in &pods[1..] {
        let PrepareStep::Known { record, .. } = ask(&of_pods, &wanted, pod, BOOT) else {
            panic!("it joins")
        };
        of_pods.put(record);
    }
    let problem = waits(ask(
        &of_pods,
        &claim("two", &["gpu/0"], &[]),
        &pod("b"),
        BOOT,
    ));
    assert!(
        problem.message.contains("default/p2, and 2 more"),
        "{problem}"
    );
}

fn ask_early(table: &ClaimTable, claim: &Claim, short: &str) -> PrepareStep {
    let holder = Holder::Early {
        driver: &driver(short),
    };
    prepare(
        table,
        &PrepareRequest {
            facts: &facts,
            now_ms: 9,
            ..request(claim, holder)
        },
    )
}

fn leave_early(table: &ClaimTable, claim: &Claim) -> UnprepareStep {
    unprepare(
        table,
        &claim.id.uid,
        UnprepareRequest::Early {
            cause: "not nominated",
        },
        5,
    )
}

#[test]
fn early_claim_passes_to_the_kubelet() {
    let wanted = claim("one", &["gpu/0", "nic/0"], &[&pod("a")]);
    let mut table = ClaimTable::default();
    let (record, drivers) = called(ask_early(&table, &wanted, "gpu"));
    assert_eq!(drivers, [driver("gpu")]);
    assert!(record.is_held_early() && record.is_held_by_kubelet());
    let end = finish_prepare(
        &record,
        Some(&driver("gpu")),
        vec![done(&record, &driver("gpu"))],
        2,
    );
    let PrepareEnd::Prepared(record) = end else {
        panic!("its driver answered: {end:?}")
    };
    table.put(record.clone());
    assert_eq!(
        ask_early(&table, &wanted, "gpu"),
        PrepareStep::Known {
            record,
            changed: false
        }
    );
    let (leaving, drivers) = unprepares(leave_early(&table, &wanted));
    assert_eq!(
        (leaving.state, drivers.as_slice()),
        (ClaimState::Unpreparing, &[driver("gpu")][..])
    );

    let PrepareStep::Known {
        record,
        changed: true,
    } = ask_part(&table, &wanted, "gpu")
    else {
        panic!("the kubelet is new")
    };
    assert!(!record.is_held_early());
    assert_eq!(
        record.timeline.back().map(|last| last.what.as_str()),
        Some("joined")
    );
    table.put(record);
    assert_eq!(leave_early(&table, &wanted), UnprepareStep::Nothing);
    // Nor does a request for another pod take it back from the kubelet.
    let PrepareStep::Call { record, .. } = ask_early(&table, &wanted, "nic") else {
        panic!("it is open")
    };
    assert!(!record.is_held_early());
    let (_, drivers) = unprepares(leave_part(&table, &wanted, "gpu"));
    assert_eq!(drivers, [driver("gpu")]);
}
