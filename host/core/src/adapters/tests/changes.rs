//! Adapters that are written, rewritten and deleted while the daemon runs.

use super::*;

fn second() -> AdapterEntry {
    AdapterEntry {
        source: "/b.adapter.yaml".to_owned(),
        ..entry_with("resource: example.com/other\ndriver: other.example.com\n")
    }
}

/// A new file had no effect before the next start.
#[tokio::test]
async fn new_adapter_adopts_its_plugin() {
    let home = Home::new();
    let run = home.start(Vec::new(), false).await;
    assert!(
        run.adapters
            .arrived(&resource(), FakePlugin::new())
            .is_none()
    );
    assert_eq!(run.apply(vec![entry()]).await, BTreeSet::new());
    assert_eq!(run.adapters.unsettled(), [resource()]);
    assert!(run.driver().inventory.is_none());
    // Its registration stays the same.
    let devices = list(&[("a", true), ("b", true)]);
    run.adapters
        .adopt(&resource(), 7, FakePlugin::new(), Some(devices));
    assert!(run.adapters.has_registration(&resource(), 7));
    let waits_for = run.adapters.list().remove(0).waits_for;
    assert!(waits_for.contains("own IDs"), "{waits_for}");
    let claim = claim(&[("r", "b")]);
    let problem = run.prepare(claim).await.unwrap_err();
    assert_eq!(problem.code, "driver-not-serving");
    // A pod has one of them by the plugin's ID.
    run.adapters
        .settle(&resource(), BTreeSet::from(["a".to_owned()]));
    run.until_published(&[("b", HEALTHY)]).await;
    assert!(run.adapters.unsettled().is_empty());
    run.adapters
        .listed(&resource(), 7, list(&[("a", true), ("c", true)]));
    run.until_published(&[("c", HEALTHY)]).await;
    run.adapters.set_taken(&Taken::new());
    run.until_published(&[("a", HEALTHY), ("c", HEALTHY)]).await;
    // The next start has it without its plugin.
    let run = home.start(vec![entry()], false).await;
    assert!(run.adapters.adapts(&resource()) && run.adapters.unsettled().is_empty());
}

#[tokio::test]
async fn new_adapter_waits_for_the_kubelet() {
    let home = Home::new();
    let run = home.start(vec![second()], true).await;
    run.apply(vec![entry(), second()]).await;
    run.adapters.adopt(
        &resource(),
        1,
        FakePlugin::new(),
        Some(list(&[("a", true)])),
    );
    run.adapters.settle(&resource(), BTreeSet::new());
    assert_eq!(run.adapters.awaited().len(), 2);
    assert!(run.published().is_none());
    run.adapters
        .set_held(&resource(), &BTreeSet::new())
        .await
        .unwrap();
    run.until_published(&[("a", HEALTHY)]).await;
}

/// A deleted file had no effect before the next start.
#[tokio::test]
async fn deleted_adapter_acts_as_disabled() {
    let home = Home::new();
    let run = home.start(vec![entry(), second()], true).await;
    let plugin = FakePlugin::new();
    run.plug(&plugin, &[("a", true)]);
    run.adapters
        .set_held(&resource(), &BTreeSet::new())
        .await
        .unwrap();
    run.until_published(&[("a", HEALTHY)]).await;
    let disabled: BTreeSet<_> = [(DRIVER.parse().unwrap(), "things".parse().unwrap())].into();
    for _ in 0..2 {
        assert_eq!(run.apply(vec![second()]).await, BTreeSet::new());
        assert_eq!(run.adapters.disabled(), disabled);
    }
    let view = || {
        let mut views = run.adapters.list().into_iter();
        views.find(|view| view.resource == resource())
    };
    assert!(view().unwrap().is_removed);
    // Its driver stays, for its claims and for the device manager.
    assert!(run.driver().claims.is_some());
    let problem = run.adapters.set_enabled(DRIVER, true).await.unwrap_err();
    assert!(problem.message.contains("in no file any more"), "{problem}");
    run.adapters
        .set_returned(&[DRIVER.parse().unwrap()].into())
        .await
        .unwrap();
    // Under another name of the file.
    let moved = AdapterEntry {
        source: "/c.adapter.yaml".to_owned(),
        ..entry()
    };
    run.apply(vec![moved, second()]).await;
    let again = view().unwrap();
    assert!(again.enabled && !again.is_removed);
    assert_eq!(again.source, "/c.adapter.yaml");
    let records = run.adapters.0.stored.lock().await.records().clone();
    assert!(
        !records[&resource()].is_returned,
        "slices may have its pool"
    );
}

#[tokio::test]
async fn unreadable_file_keeps_its_adapter() {
    let home = Home::new();
    let run = home.start(vec![entry(), second()], true).await;
    let unread = AdapterEntries {
        entries: vec![second()],
        is_incomplete: true,
    };
    let claimed = Claimed::new();
    let applied = run.adapters.apply(unread, &claimed, &run.tasks);
    assert_eq!(applied.await, Ok(BTreeSet::new()));
    let views = run.adapters.list();
    assert!(views.iter().all(|view| view.enabled && !view.is_removed));
    assert_eq!(views[1].source, "/a.adapter.yaml");
}

/// The condition of an entry that did not count stayed after the entry was repaired.
#[tokio::test]
async fn conflicts_end_with_their_entries() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    let copy = || AdapterEntry {
        source: "/b.adapter.yaml".to_owned(),
        ..entry_with(&format!("resource: example.com/other\ndriver: {DRIVER}\n"))
    };
    run.apply(vec![entry(), copy()]).await;
    assert_eq!(run.codes(), ["adapter-conflict"]);
    assert_eq!(run.adapters.list().len(), 1);
    run.apply(vec![entry(), second()]).await;
    assert_eq!(run.codes(), Vec::<String>::new());
    assert_eq!(run.adapters.list().len(), 2);
    // The driver of a deleted adapter is of no other one before a start.
    run.apply(vec![
        second(),
        AdapterEntry {
            source: "/c".to_owned(),
            ..entry_with(&format!("resource: example.com/third\ndriver: {DRIVER}\n"))
        },
    ])
    .await;
    assert_eq!(run.codes(), ["adapter-conflict"]);
    assert_eq!(run.adapters.list().len(), 2);
}

#[tokio::test]
async fn change_without_commit_has_no_effect() {
    let home = Home::new();
    let run = home.start(Vec::new(), false).await;
    home.checkpoint.close().await;
    let entries = AdapterEntries {
        entries: vec![entry()],
        is_incomplete: false,
    };
    let claimed = Claimed::new();
    let applied = run.adapters.apply(entries, &claimed, &run.tasks);
    assert_eq!(applied.await.unwrap_err().code, "checkpoint-unavailable");
    assert!(!run.adapters.adapts(&resource()));
}
