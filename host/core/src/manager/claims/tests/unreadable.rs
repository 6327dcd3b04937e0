//! Claims whose records are those of a newer release: what is theirs is there when that one is back.

use crate::driver::values::{Journal, Write};
use crate::manager::claims::fixtures::{claim, uid};
use crate::manager::tests::scene::with_gpu;

#[tokio::test]
async fn unreadable_claim_keeps_file_and_values() {
    let (home, daemon, a, gpu) = with_gpu();
    for (name, device) in [("one", "gpu/0"), ("two", "gpu/1")] {
        let claim = claim(name, &[device], &[&a]);
        let (driver, claims, path) = (&gpu.name, [claim.id.clone()], "led");
        let write = Write {
            driver,
            claims: &claims,
            path,
            inode: 1,
            before: Some("0"),
            value: "1",
        };
        daemon.values.intend(&write).await.unwrap();
        daemon.source.put(claim);
    }
    daemon.prepare(&a, &["one", "two"]).await;
    let files = daemon.cdi_files();
    daemon.stop().await;
    home.make_unreadable("uid-one");

    let daemon = home.start();
    assert_eq!(
        (
            daemon.state("uid-one"),
            daemon.manager.records.claims().len()
        ),
        (None, 1)
    );
    daemon.sweep().await;
    assert_eq!(daemon.cdi_files(), files);
    daemon.manager.unfinished.resume_values().await;
    assert!(
        daemon.values.of(&uid("uid-one")).is_some() && daemon.values.of(&uid("uid-two")).is_some()
    );
}
