use super::*;
use crate::records::values::records::{VALUES_BYTES_PER_CLAIM_MAX, VALUES_PER_CLAIM_MAX};

fn claim(short: &str) -> ObjectRef {
    ObjectRef::new("default", short, &format!("uid-{short}")).unwrap()
}

fn driver() -> DriverName {
    DriverName::new("led.example.com").unwrap()
}

/// A `/sys` of one file, and drivers that write to it.
struct Scene {
    records: Records,
    value: String,
}

impl Scene {
    fn new() -> Self {
        Self {
            records: Records::new(Vec::new(), "boot-1"),
            value: "0".to_owned(),
        }
    }

    fn intend(&mut self, claims: &[&str], value: &str) -> Result<(), Problem> {
        let before = self.value.clone();
        with_write(claims, Some(&before), value, |write| {
            self.records.intend(write)
        })
    }

    /// A write that is made.
    fn write(&mut self, claims: &[&str], value: &str) {
        self.intend(claims, value).unwrap();
        value.clone_into(&mut self.value);
        with_write(claims, None, value, |write| {
            self.records.settle(write, Some(value))
        });
    }

    fn kept(&self, claim: &str) -> Option<(Option<&str>, Option<&str>)> {
        let record = self
            .records
            .claims
            .values()
            .find(|record| record.id.name.as_str() == claim)?;
        let kept = record.drivers.get(&driver())?.first()?;
        Some((kept.before.as_deref(), kept.left()))
    }

    /// Releases a claim as the host does: the name of the claim that it leaves the value to, or none and the value is restored.
    fn release(&mut self, short: &str) -> Option<String> {
        let uid = claim(short).uid;
        let (_, kept) = self.records.newest_first(&uid, |_| true).remove(0);
        let other = self
            .records
            .successor(&uid, &kept, &|_| false)
            .map(|(other, _)| other.name.to_string());
        if other.is_none() && kept.may_have_left(&self.value) {
            self.value = kept.before.unwrap();
        }
        self.records.end(&uid, None);
        other
    }
}

fn with_write<T>(
    claims: &[&str],
    before: Option<&str>,
    value: &str,
    act: impl FnOnce(&Write<'_>) -> T,
) -> T {
    let claims: Vec<_> = claims.iter().map(|short| claim(short)).collect();
    let driver = driver();
    act(&Write {
        driver: &driver,
        claims: &claims,
        path: "led",
        inode: 1,
        before,
        value,
    })
}

#[test]
fn first_and_last_values_are_kept() {
    let mut scene = Scene::new();
    scene.write(&["a"], "1");
    scene.write(&["a"], "2");
    assert_eq!(scene.kept("a"), Some((Some("0"), Some("2"))));
    scene.intend(&["a"], "3").unwrap();
    let record = scene.records.get(&claim("a").uid).unwrap();
    let kept = &record.drivers[&driver()][0];
    assert!(kept.may_have_left("2") && kept.may_have_left("3") && !kept.may_have_left("1"));
}

#[test]
fn failed_write_leaves_no_record() {
    let mut scene = Scene::new();
    scene.intend(&["a"], "1").unwrap();
    with_write(&["a"], None, "1", |write| scene.records.settle(write, None));
    assert_eq!(scene.kept("a"), None);
    scene.write(&["a"], "1");
    scene.intend(&["a"], "2").unwrap();
    with_write(&["a"], None, "2", |write| scene.records.settle(write, None));
    assert_eq!(scene.kept("a"), Some((Some("0"), Some("1"))));
}

#[test]
fn current_value_counts_after_a_crash() {
    let mut scene = Scene::new();
    scene.intend(&["a"], "on").unwrap();
    // It was made, the kernel shows it in its own way, and the daemon died.
    scene.value = "Y".to_owned();
    scene.intend(&["a"], "on").unwrap();
    let kept = &scene.records.get(&claim("a").uid).unwrap().drivers[&driver()][0];
    assert_eq!(
        (kept.before.as_deref(), kept.after.as_deref()),
        (Some("0"), Some("Y"))
    );
}

enum Step {
    /// A write for claims.
    Write(&'static [&'static str], &'static str),
    /// Another program writes.
    Other(&'static str),
    /// The release of a claim, which restores the value.
    Restored(&'static str),
    /// The release of a claim, which leaves the value to a later one.
    LeftTo(&'static str, &'static str),
    /// The value now.
    Value(&'static str),
    /// The values that a claim found and left.
    Kept(&'static str, &'static str, &'static str),
}

/// The final value is as if no claim had existed: the later of several claims restores the value of the earlier one, or inherits it.
#[test]
fn values_are_restored_in_any_order() {
    use Step::{Kept, LeftTo, Other, Restored, Value, Write};
    let histories: [&[Step]; 7] = [
        &[
            Write(&["a"], "1"),
            Write(&["b"], "2"),
            Restored("b"),
            Value("1"),
            Restored("a"),
            Value("0"),
        ],
        &[
            Write(&["a"], "1"),
            Write(&["b"], "2"),
            Write(&["c"], "3"),
            LeftTo("b", "c"),
            Value("3"),
            Kept("c", "1", "3"),
            LeftTo("a", "c"),
            Kept("c", "0", "3"),
            Restored("c"),
            Value("0"),
        ],
        // A value that another program set in between is not inherited.
        &[
            Write(&["a"], "1"),
            Other("5"),
            Write(&["b"], "6"),
            LeftTo("a", "b"),
            Restored("b"),
            Value("5"),
        ],
        // Claims of one call.
        &[
            Write(&["a", "b"], "1"),
            LeftTo("a", "b"),
            Value("1"),
            Restored("b"),
            Value("0"),
        ],
        &[
            Write(&["a", "b"], "1"),
            LeftTo("b", "a"),
            Value("1"),
            Restored("a"),
            Value("0"),
        ],
        &[
            Write(&["a"], "1"),
            Write(&["a", "b"], "2"),
            LeftTo("a", "b"),
            Restored("b"),
            Value("0"),
        ],
        // The same value twice.
        &[
            Write(&["a"], "1"),
            Write(&["b"], "1"),
            LeftTo("a", "b"),
            Value("1"),
            Restored("b"),
            Value("0"),
        ],
    ];
    for (number, history) in histories.into_iter().enumerate() {
        let mut scene = Scene::new();
        for step in history {
            match step {
                Write(claims, value) => scene.write(claims, value),
                Other(value) => scene.value = (*value).to_owned(),
                Restored(claim) => assert_eq!(scene.release(claim), None, "history {number}"),
                LeftTo(claim, heir) => {
                    assert_eq!(scene.release(claim).as_deref(), Some(*heir), "{number}")
                }
                Value(value) => assert_eq!(scene.value, *value, "history {number}"),
                Kept(claim, before, left) => {
                    assert_eq!(
                        scene.kept(claim),
                        Some((Some(*before), Some(*left))),
                        "history {number}"
                    );
                }
            }
        }
    }
}

/// A claim that inherits knows the value to which its own restore may have set the file before. Without such a restore, that value counts
/// as another program's.
#[test]
fn inheriting_claim_knows_its_pending_restore() {
    for restoring in [false, true] {
        let mut scene = Scene::new();
        scene.write(&["a"], "1");
        scene.write(&["b"], "2");
        let (a, b) = (claim("a").uid, claim("b").uid);
        if restoring {
            assert!(scene.records.intend_restore(&b, |_| true));
            assert!(!scene.records.intend_restore(&b, |_| true), "that is known");
        }
        scene.records.end(&a, None);
        assert_eq!(
            scene.records.newest_first(&b, |_| true)[0]
                .1
                .may_have_left("1"),
            restoring
        );
        assert_eq!(scene.kept("b"), Some((Some("0"), Some("2"))));
        scene.value = "0".to_owned();
        scene.write(&["b"], "4");
        assert!(
            !scene.records.newest_first(&b, |_| true)[0]
                .1
                .may_have_left("1"),
            "it was written again"
        );
    }
}

#[test]
fn replugged_device_starts_a_new_record() {
    let mut scene = Scene::new();
    scene.write(&["a"], "1");
    let claims = [claim("a")];
    let driver = driver();
    let before = Some("7");
    let write = Write {
        driver: &driver,
        claims: &claims,
        path: "led",
        inode: 2,
        before,
        value: "8",
    };
    scene.records.intend(&write).unwrap();
    assert_eq!(scene.kept("a"), Some((Some("7"), Some("8"))));
}

#[test]
fn values_of_another_boot_are_void() {
    let mut scene = Scene::new();
    scene.write(&["a"], "1");
    let claims: Vec<_> = scene.records.claims.values().cloned().collect();
    let same = Records::new(claims.clone(), "boot-1");
    assert_eq!(
        (same.claims.len(), same.last_order, same.outlived.len()),
        (1, 1, 0)
    );
    let later = Records::new(claims, "boot-2");
    assert_eq!((later.claims.len(), later.last_order), (0, 0));
    assert_eq!(later.outlived, [claim("a").uid]);
}

#[test]
fn values_of_claim_are_bounded() {
    let claims = [claim("a")];
    let driver = driver();
    let intend = |records: &mut Records, path: &str, value: &str| {
        records.intend(&Write {
            driver: &driver,
            claims: &claims,
            path,
            inode: 1,
            before: Some("0"),
            value,
        })
    };
    let mut records = Records::new(Vec::new(), "boot-1");
    (0..VALUES_PER_CLAIM_MAX).for_each(|n| intend(&mut records, &format!("led{n}"), "1").unwrap());
    let problem = intend(&mut records, "one-more", "1").unwrap_err();
    assert_eq!(
        (problem.code.as_str(), problem.kind.is_permanent()),
        ("too-many-values", true)
    );
    intend(&mut records, "led0", "2").unwrap();

    let mut records = Records::new(Vec::new(), "boot-1");
    let large = "x".repeat(4096);
    let taken = (0..VALUES_PER_CLAIM_MAX)
        .take_while(|n| intend(&mut records, &format!("led{n}"), &large).is_ok());
    assert!(taken.count() <= VALUES_BYTES_PER_CLAIM_MAX / large.len() + 1);
}

#[test]
fn later_driver_inherits_original_value() {
    let mut scene = Scene::new();
    scene.write(&["a"], "1");
    let (uid, later) = (claim("a").uid, DriverName::new("fan.example.com").unwrap());
    let write = Write {
        driver: &later,
        claims: &[claim("a")],
        path: "led",
        inode: 1,
        before: Some("1"),
        value: "2",
    };
    scene.records.intend(&write).unwrap();
    let first = scene.records.get(&uid).unwrap().drivers[&driver()][0].clone();
    let stays = |name: &DriverName| *name == later;
    assert_eq!(
        scene.records.successor(&uid, &first, &stays),
        Some((&claim("a"), &later))
    );
    assert_eq!(
        scene.records.successor(&uid, &first, &|_| false),
        None,
        "both give the claim up"
    );
    scene.records.end(&uid, Some(&driver()));
    let left = scene.records.newest_first(&uid, |_| true);
    assert_eq!((left.len(), left[0].1.before.as_deref()), (1, Some("0")));
}

#[test]
fn unprepare_ends_one_drivers_values() {
    let mut scene = Scene::new();
    scene.write(&["a"], "1");
    let other = DriverName::new("fan.example.com").unwrap();
    let claims = [claim("a")];
    let write = Write {
        driver: &other,
        claims: &claims,
        path: "fan",
        inode: 3,
        before: Some("0"),
        value: "9",
    };
    scene.records.intend(&write).unwrap();
    let ended = scene.records.end(&claim("a").uid, Some(&driver()));
    assert!(ended.before.is_some() && ended.heirs.is_empty());
    let left = scene.records.newest_first(&claim("a").uid, |_| true);
    assert_eq!(
        left.iter().map(|(driver, _)| driver).collect::<Vec<_>>(),
        [&other]
    );
    scene.records.restore(ended.before.unwrap());
    assert_eq!(
        scene.records.newest_first(&claim("a").uid, |_| true).len(),
        2
    );
}

#[test]
fn progress_ends_with_its_claim() {
    let mut records = Records::new(Vec::new(), "boot-1");
    let (one, uid) = (claim("one"), claim("one").uid);
    assert_eq!(records.set_progress(&one, &driver(), b"a".to_vec()), b"");
    assert_eq!(records.set_progress(&one, &driver(), b"b".to_vec()), b"a");
    assert_eq!(records.progress(&uid, &driver()), b"b");
    let before = records.drop_progress(&uid, &driver()).unwrap();
    assert_eq!(
        (records.progress(&uid, &driver()), records.get(&uid)),
        (Vec::new(), None)
    );
    assert_eq!(records.drop_progress(&uid, &driver()), None);
    records.restore(before);
    assert_eq!(records.progress(&uid, &driver()), b"b", "the commit failed");
    records.end(&uid, Some(&driver()));
    assert_eq!(records.get(&uid), None);
}

#[test]
fn progress_outlives_reboot_unlike_values() {
    let mut scene = Scene::new();
    scene.write(&["one"], "1");
    scene
        .records
        .set_progress(&claim("one"), &driver(), b"half".to_vec());
    scene.write(&["two"], "2");
    let stored: Vec<_> = scene.records.claims.into_values().collect();
    let records = Records::new(stored, "boot-2");
    assert_eq!(records.progress(&claim("one").uid, &driver()), b"half");
    assert!(records.get(&claim("one").uid).unwrap().drivers.is_empty());
    assert_eq!(records.get(&claim("two").uid), None);
    assert_eq!(records.outlived.len(), 2);
}

#[test]
fn previous_value_precedes_first_write() {
    let mut scene = Scene::new();
    scene.write(&["one"], "1");
    scene.write(&["one"], "2");
    let before = |claims: &[ObjectRef]| scene.records.before(&driver(), claims, "led");
    assert_eq!(before(&[claim("one")]), Some((1, "0".to_owned())));
    assert_eq!(before(&[claim("two")]), None, "another claim's");
    assert_eq!(
        scene.records.before(&driver(), &[claim("one")], "other"),
        None
    );
}
