//! Adapters of a start, as the files, the record and the claims decide them.

use super::*;

#[tokio::test]
async fn decisions_and_removed_adapters_survive_restart() {
    let home = Home::new();
    let disabled: BTreeSet<_> = [(DRIVER.parse().unwrap(), "things".parse().unwrap())].into();
    {
        let run = home.start(vec![entry()], true).await;
        assert!(run.adapters.disabled().is_empty());
        let problem = run
            .adapters
            .set_enabled("other.example.com", false)
            .await
            .unwrap_err();
        assert!(problem.code == "adapter-unknown" && problem.message.contains("other.example.com"));
        assert!(
            !run.adapters
                .set_enabled(DRIVER, false)
                .await
                .unwrap()
                .enabled
        );
        assert_eq!(run.adapters.disabled(), disabled);
    }
    assert_eq!(
        home.start(vec![entry()], true).await.adapters.disabled(),
        disabled
    );
    let run = home.start(vec![entry()], true).await;
    run.adapters.set_enabled(DRIVER, true).await.unwrap();
    // Without its file it acts as a disabled one, until the device manager has its pool.
    let run = home.start(Vec::new(), true).await;
    let view = run.adapters.list().remove(0);
    assert!(view.is_removed && !view.enabled && run.adapters.disabled() == disabled);
    let problem = run.adapters.set_enabled(DRIVER, true).await.unwrap_err();
    assert!(problem.message.contains("in no file any more"), "{problem}");
    run.adapters
        .set_returned(&[DRIVER.parse().unwrap()].into())
        .await
        .unwrap();
    assert!(
        home.start_with(Vec::new(), true, Taken::new(), &[DRIVER])
            .await
            .adapters
            .adapts(&resource()),
        "it has claims"
    );
    assert!(
        !home
            .start(Vec::new(), true)
            .await
            .adapters
            .adapts(&resource())
    );
}

#[tokio::test]
async fn rewritten_adapter_takes_over_again() {
    let home = Home::new();
    let ids: BTreeSet<_> = ["a".to_owned()].into();
    {
        let run = home.start(vec![entry()], true).await;
        run.adapters
            .set_held(&resource(), &BTreeSet::new())
            .await
            .unwrap();
        run.adapters.set_enabled(DRIVER, false).await.unwrap();
        run.adapters
            .set_returned(&[DRIVER.parse().unwrap()].into())
            .await
            .unwrap();
    }
    // The kubelet is offered the plugin's own IDs, and a pod gets one of them.
    assert!(
        !home
            .start(Vec::new(), true)
            .await
            .adapters
            .adapts(&resource())
    );
    let run = home.start(vec![entry()], true).await;
    run.plug(&FakePlugin::new(), &[("a", true), ("b", true)]);
    assert_eq!(run.adapters.awaited().len(), 1);
    run.adapters.set_held(&resource(), &ids).await.unwrap();
    run.until_published(&[("b", HEALTHY)]).await;
    assert_eq!(
        run.adapters.held_at_kubelet(),
        [(resource(), DRIVER.parse().unwrap(), ids)]
    );
}

#[tokio::test]
async fn second_adapter_is_recorded_before_claims() {
    let home = Home::new();
    drop(
        home.start(
            vec![entry_with(
                "resource: example.com/first\ndriver: first.example.com\n",
            )],
            false,
        )
        .await,
    );
    drop(home.start(vec![entry()], false).await);
    assert!(
        home.start_with(Vec::new(), false, Taken::new(), &[DRIVER])
            .await
            .adapters
            .adapts(&resource())
    );
}

#[tokio::test]
async fn unreadable_adapter_file_changes_nothing() {
    let home = Home::new();
    let rules = "devices: [{ match: '(?<n>[a-z])', identity: 'bus:${n}', attributes: { n: { value: '${n}' } } }]";
    let text = format!("resource: {RESOURCE}\ndriver: {DRIVER}\npool: things\n{rules}\n");
    let before = home.start(vec![entry_with(&text)], true).await;
    let unread = AdapterEntries {
        entries: Vec::new(),
        is_incomplete: true,
    };
    drop(home.load(unread.clone(), true, Taken::new(), &[]).await);
    let run = home.load(unread.clone(), true, Taken::new(), &[]).await;
    // Without the identity another driver could give the same hardware to a pod.
    let rules = |run: &Run| {
        run.adapters.state().adapted[&resource()]
            .adapter
            .rules
            .clone()
    };
    assert!(rules(&before).len() == 1 && rules(&before) == rules(&run));
    assert_eq!(
        run.adapters.state().adapted[&resource()]
            .adapter
            .identity("b"),
        ["bus:b"]
    );
    let view = run.adapters.list().remove(0);
    assert!(view.enabled && !view.is_removed && run.adapters.disabled().is_empty());
    run.adapters.set_enabled(DRIVER, false).await.unwrap();
    assert!(
        !home
            .load(unread, true, Taken::new(), &[])
            .await
            .adapters
            .disabled()
            .is_empty()
    );
}

#[tokio::test]
async fn adapter_cannot_take_claimed_driver_name() {
    let home = Home::new();
    let entries = AdapterEntries {
        entries: vec![entry()],
        is_incomplete: false,
    };
    let run = home
        .load(entries, false, Taken::new(), &[(DRIVER, DriverKind::Wasm)])
        .await;
    assert!(
        !run.adapters.adapts(&resource()) && run.registry.kind(&DRIVER.parse().unwrap()).is_none()
    );
    assert_eq!(run.codes(), ["adapter-conflict"]);
}

/// A copy of the file, first by its name and with another resource, took the driver's name from the adapter that had claims: its plugin was
/// offered as a device plugin while pods had its devices.
#[tokio::test]
async fn recorded_driver_keeps_its_resource() {
    let home = Home::new();
    drop(home.start(vec![entry()], false).await);
    let copy = || AdapterEntry {
        source: "/Copy of a.adapter.yaml".to_owned(),
        ..entry_with(&format!(
            "resource: example.com/other\ndriver: {DRIVER}\npool: things\n"
        ))
    };
    let adapted = |run: &Run| {
        let views = run.adapters.list().into_iter();
        views
            .map(|view| (view.resource.to_string(), view.is_removed))
            .collect::<Vec<_>>()
    };
    let both = || vec![copy(), entry()];
    for (entries, claimed, is_removed) in [
        (both(), &[][..], false),
        (both(), &[DRIVER][..], false),
        (vec![copy()], &[DRIVER][..], true),
    ] {
        let run = home.start_with(entries, false, Taken::new(), claimed).await;
        assert_eq!(adapted(&run), [(RESOURCE.to_owned(), is_removed)]);
        let condition = run.conditions.list().remove(0);
        assert_eq!(
            (run.codes().len(), condition.problem.code.as_str()),
            (1, "adapter-conflict")
        );
        assert!(
            condition.problem.message.contains("/Copy of a"),
            "{:?}",
            condition.problem
        );
        assert!(
            condition.problem.message.contains(RESOURCE),
            "{:?}",
            condition.problem
        );
    }
    // On a Kubernetes node slices may have it until the device manager does.
    let run = home.start(vec![copy()], true).await;
    assert_eq!(adapted(&run), [(RESOURCE.to_owned(), true)]);
    run.adapters
        .set_returned(&[DRIVER.parse().unwrap()].into())
        .await
        .unwrap();
    let run = home.start(vec![copy()], true).await;
    assert_eq!(
        (adapted(&run), run.codes().len()),
        (vec![("example.com/other".to_owned(), false)], 0)
    );
}

#[tokio::test]
async fn refused_adapter_file_changes_nothing() {
    let home = Home::new();
    let of = |driver: &str| entry_with(&format!("resource: example.com/other\ndriver: {driver}\n"));
    drop(
        home.start(vec![entry(), of("other.example.com")], false)
            .await,
    );
    let run = home.start(vec![entry(), of(DRIVER)], false).await;
    let views = run.adapters.list();
    let drivers: Vec<_> = views
        .iter()
        .map(|view| (view.driver.as_str(), view.is_removed))
        .collect();
    assert_eq!(drivers, [("other.example.com", false), (DRIVER, false)]);
    assert_eq!(run.codes(), ["adapter-conflict"]);
}

#[tokio::test]
async fn new_driver_waits_for_earlier_claims() {
    let home = Home::new();
    drop(home.start(vec![entry()], false).await);
    let renamed = || {
        vec![entry_with(&format!(
            "resource: {RESOURCE}\ndriver: new.example.com\n"
        ))]
    };
    let run = home
        .start_with(renamed(), false, Taken::new(), &[DRIVER])
        .await;
    assert_eq!(run.adapters.list()[0].driver.as_str(), DRIVER);
    let message = run.conditions.list().remove(0).problem.message;
    assert!(
        message.contains("new.example.com") && message.contains(DRIVER),
        "{message}"
    );
    let run = home.start(renamed(), false).await;
    assert_eq!(run.adapters.list()[0].driver.as_str(), "new.example.com");
    assert!(run.codes().is_empty());
}

#[tokio::test]
async fn decision_without_commit_has_no_effect() {
    let home = Home::new();
    let run = home.start(vec![entry()], true).await;
    run.adapters.set_enabled(DRIVER, false).await.unwrap();
    let stored = checkpoint::read(&home.path().join("checkpoint.db")).unwrap();
    let decided: Vec<_> = stored
        .adapters
        .iter()
        .map(|record| (record.resource.as_str(), record.enabled))
        .collect();
    assert_eq!(decided, [(RESOURCE, Some(false))]);
    home.checkpoint.close().await;
    let problem = run.adapters.set_enabled(DRIVER, true).await.unwrap_err();
    assert_eq!(problem.code, "checkpoint-unavailable");
    assert!(!run.adapters.list()[0].enabled);
}
