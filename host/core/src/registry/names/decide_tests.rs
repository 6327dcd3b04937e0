//! Generated cases: owners, sources, claims and grants, in every order of their requests.

use proptest::prelude::*;

use super::*;

fn name() -> DriverName {
    DriverName::new("gpu.example.com").unwrap()
}

fn other_name() -> DriverName {
    DriverName::new("nic.example.com").unwrap()
}

fn file(stem: &str) -> SourceFacts {
    SourceFacts {
        source: Some(NameSource::file(stem)),
        grant: Fact::Nothing,
        digest: Fact::Is(format!("digest-{stem}")),
        described: Some(name()),
    }
}

fn plugin(uid: u32) -> SourceFacts {
    SourceFacts {
        source: Some(NameSource::plugin(uid)),
        digest: Fact::Nothing,
        ..file("")
    }
}

fn granted(facts: SourceFacts) -> SourceFacts {
    SourceFacts {
        grant: Fact::Is(name()),
        ..facts
    }
}

/// The state in which all sources are read.
#[derive(Debug, Clone)]
struct World {
    owner: Option<NameOwner>,
    has_claims: bool,
    sources: Vec<SourceFacts>,
    is_served: bool,
    is_listed: bool,
    plugins_may_come: bool,
}

impl World {
    fn of(sources: impl IntoIterator<Item = SourceFacts>) -> Self {
        Self {
            owner: None,
            has_claims: false,
            sources: sources.into_iter().collect(),
            is_served: false,
            is_listed: true,
            plugins_may_come: false,
        }
    }

    fn owned_by(self, source: NameSource) -> Self {
        Self {
            owner: Some(NameOwner::Source(source)),
            ..self
        }
    }

    fn with_claims(self) -> Self {
        Self {
            has_claims: true,
            ..self
        }
    }

    fn ask(&self, at: usize) -> Decision {
        self.ask_for(&name(), at)
    }

    fn ask_for(&self, name: &DriverName, at: usize) -> Decision {
        let others = self
            .sources
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != at);
        let known = Known {
            owner: self.owner.as_ref(),
            has_claims: self.has_claims,
            others: others.map(|(_, facts)| facts).collect(),
            is_served: self.is_served,
            is_listed: self.is_listed,
            is_late: false,
            plugins_may_come: self.plugins_may_come,
            reserved: None,
        };
        decide(name, &self.sources[at], &known)
    }

    /// The sources request the name in an order until nothing changes; returns the owner.
    fn settle(mut self, order: &[usize]) -> Option<NameSource> {
        for at in order.iter().chain(order) {
            if let Decision::Owns | Decision::Binds = self.ask(*at) {
                self.owner = self.sources[*at].source.clone().map(NameOwner::Source);
            }
        }
        match self.owner {
            Some(NameOwner::Source(source)) => Some(source),
            _ => None,
        }
    }
}

fn refused(decision: Decision) -> NameRefusal {
    match decision {
        Decision::Refused(why) => why,
        other => panic!("{other:?}"),
    }
}

/// A driver with such a name would be called for the devices of a plugin.
#[test]
fn plugin_driver_names_are_reserved() {
    let of_plugin = nodedock_model::plugin_driver(&"example.com/gpu".parse().unwrap());
    assert_eq!(of_plugin.as_str(), "gpu.example.com.plugin.nodedock.dev");
    for name in [of_plugin, DriverName::new("plugin.nodedock.dev").unwrap()] {
        let asking = SourceFacts {
            grant: Fact::Is(name.clone()),
            ..file("a")
        };
        assert_eq!(
            refused(World::of([asking]).ask_for(&name, 0)),
            NameRefusal::OfPlugins
        );
    }
}

#[test]
fn owner_is_known_before_loading() {
    let loading = SourceFacts {
        described: None,
        digest: Fact::Unread,
        grant: Fact::Unread,
        ..file("gpu")
    };
    let world = World::of([file("aaa"), loading.clone()]).owned_by(NameSource::file("gpu"));
    assert_eq!(
        refused(world.ask(0)),
        NameRefusal::Belongs(NameSource::file("gpu"))
    );
    assert_eq!(world.ask(1), Decision::Owns);
    // The directory is being read: the owner may be in it.
    let unlisted = World {
        is_listed: false,
        ..World::of([file("aaa")]).owned_by(NameSource::file("gpu"))
    };
    assert_eq!(unlisted.ask(0), Decision::Waits);
    assert_eq!(
        World {
            has_claims: true,
            ..unlisted
        }
        .ask(0),
        Decision::Refused(NameRefusal::Belongs(NameSource::file("gpu")))
    );
}

#[test]
fn name_ends_with_source_and_claims() {
    let world = World::of([file("aaa")]).owned_by(NameSource::file("gpu"));
    assert_eq!(world.ask(0), Decision::Binds);
    assert_eq!(
        refused(world.with_claims().ask(0)),
        NameRefusal::Belongs(NameSource::file("gpu"))
    );
    // A file that describes another driver by now has left its name.
    let renamed = SourceFacts {
        described: Some(other_name()),
        ..file("gpu")
    };
    let world = World::of([file("aaa"), renamed]).owned_by(NameSource::file("gpu"));
    assert_eq!(world.ask(0), Decision::Binds);
    // Its version before serves on.
    let served = World {
        is_served: true,
        ..world
    };
    assert_eq!(
        refused(served.ask(0)),
        NameRefusal::Belongs(NameSource::file("gpu"))
    );
}

#[test]
fn source_kinds_do_not_share_names() {
    let of_plugin = World::of([file("gpu"), plugin(0)]).owned_by(NameSource::plugin(0));
    assert_eq!(
        refused(of_plugin.ask(0)),
        NameRefusal::Belongs(NameSource::plugin(0))
    );
    let of_file = World::of([plugin(0), file("gpu")]).owned_by(NameSource::file("gpu"));
    assert_eq!(
        refused(of_file.ask(0)),
        NameRefusal::Belongs(NameSource::file("gpu"))
    );
    let image = SourceFacts {
        source: Some(NameSource::image("gpu")),
        ..file("gpu")
    };
    assert!(matches!(
        World::of([image])
            .owned_by(NameSource::file("gpu"))
            .with_claims()
            .ask(0),
        Decision::Refused(_)
    ));
}

#[test]
fn plugin_instances_share_a_name() {
    let world = World::of([plugin(0), plugin(0), plugin(1000)]).owned_by(NameSource::plugin(0));
    assert_eq!(
        (world.ask(0), world.ask(1)),
        (Decision::Owns, Decision::Owns)
    );
    assert_eq!(
        refused(world.ask(2)),
        NameRefusal::Belongs(NameSource::plugin(0))
    );
}

#[test]
fn restarting_plugin_keeps_its_name() {
    let world = World::of([file("aaa")]).owned_by(NameSource::plugin(0));
    assert_eq!(
        World {
            plugins_may_come: true,
            ..world.clone()
        }
        .ask(0),
        Decision::Waits
    );
    let unknown = SourceFacts {
        source: None,
        described: None,
        ..plugin(0)
    };
    let unconnected = World {
        sources: vec![file("aaa"), unknown],
        ..world.clone()
    };
    assert_eq!(unconnected.ask(0), Decision::Waits);
    assert_eq!(world.ask(0), Decision::Binds);
}

#[test]
fn single_grant_moves_a_name() {
    let world = World::of([file("aaa"), granted(file("gpu"))])
        .owned_by(NameSource::file("aaa"))
        .with_claims();
    assert_eq!(world.ask(1), Decision::Binds);
    let both =
        World::of([granted(file("aaa")), granted(file("gpu"))]).owned_by(NameSource::file("aaa"));
    assert_eq!(
        refused(both.ask(1)),
        NameRefusal::Belongs(NameSource::file("aaa"))
    );
    let unread = SourceFacts {
        grant: Fact::Unread,
        ..file("aaa")
    };
    let world = World::of([unread, granted(file("gpu"))]).owned_by(NameSource::file("aaa"));
    assert_eq!(world.ask(1), Decision::Waits);
}

#[test]
fn grant_for_another_driver_refuses_name() {
    let facts = SourceFacts {
        grant: Fact::Is(other_name()),
        ..file("gpu")
    };
    let world = World::of([facts]).owned_by(NameSource::file("gpu"));
    assert_eq!(
        refused(world.ask(0)),
        NameRefusal::GrantOfAnother(other_name())
    );
}

#[test]
fn new_name_waits_for_other_grants() {
    let unread = SourceFacts {
        grant: Fact::Unread,
        described: None,
        ..file("gpu")
    };
    assert_eq!(World::of([file("aaa"), unread]).ask(0), Decision::Waits);
    assert_eq!(
        refused(World::of([file("aaa"), granted(file("gpu"))]).ask(0)),
        NameRefusal::Granted(NameSource::file("gpu"))
    );
    assert_eq!(
        World::of([file("aaa"), file("gpu")]).ask(0),
        Decision::Binds
    );
    assert_eq!(
        World {
            is_listed: false,
            ..World::of([file("aaa")])
        }
        .ask(0),
        Decision::Waits
    );
}

#[test]
fn claims_decide_an_unrecorded_name() {
    let world = |evidence| {
        let sources = [file("aaa"), file("gpu"), plugin(0)];
        World {
            owner: Some(NameOwner::Evidence(evidence)),
            ..World::of(sources).with_claims()
        }
    };
    let binds = |world: &World| [0, 1, 2].map(|at| world.ask(at) == Decision::Binds);
    assert_eq!(
        binds(&world(Evidence::Stem("gpu".to_owned()))),
        [false, true, false]
    );
    assert_eq!(
        binds(&world(Evidence::Digests(["digest-gpu".to_owned()].into()))),
        [false, true, false]
    );
    assert_eq!(
        binds(&world(Evidence::Kind(SourceKind::Plugin))),
        [false, false, true]
    );
    assert_eq!(
        binds(&world(Evidence::Kind(SourceKind::File))),
        [true, true, false]
    );
    // No file has the digest: the first that serves gets the name.
    assert_eq!(
        binds(&world(Evidence::Digests(["gone".to_owned()].into()))),
        [true, true, true]
    );
    let mut unread = world(Evidence::Digests(["gone".to_owned()].into()));
    unread.sources[1].digest = Fact::Unread;
    assert_eq!(unread.ask(0), Decision::Waits);
}

#[test]
fn unreadable_record_requires_a_grant() {
    let world = World {
        owner: Some(NameOwner::Unreadable),
        ..World::of([file("aaa"), granted(file("gpu"))])
    };
    assert_eq!(
        (refused(world.ask(0)), world.ask(1)),
        (NameRefusal::Unreadable, Decision::Binds)
    );
}

fn sources() -> impl Strategy<Value = Vec<SourceFacts>> {
    let all = vec![
        file("aaa"),
        file("gpu"),
        SourceFacts {
            source: Some(NameSource::image("gpu")),
            ..file("gpu")
        },
        plugin(0),
        plugin(1000),
        SourceFacts {
            source: Some(NameSource::file("zzz")),
            described: None,
            ..file("zzz")
        },
    ];
    let grants = prop::collection::vec(0..4_u8, all.len());
    let granting = |(mut facts, grants): (Vec<SourceFacts>, Vec<u8>)| {
        for (facts, grant) in facts.iter_mut().zip(grants) {
            match grant {
                0 => *facts = granted(facts.clone()),
                1 => facts.grant = Fact::Is(other_name()),
                _ => {}
            }
        }
        facts
    };
    (prop::sample::subsequence(all, 1..=6), grants).prop_map(granting)
}

fn owners() -> impl Strategy<Value = Option<NameOwner>> {
    let source = prop::sample::select(vec![
        NameSource::file("aaa"),
        NameSource::file("gpu"),
        NameSource::image("gpu"),
        NameSource::plugin(0),
        NameSource::file("gone"),
    ]);
    prop::option::of(source.prop_map(NameOwner::Source))
}

fn worlds() -> impl Strategy<Value = (World, Vec<usize>)> {
    let world =
        (owners(), any::<bool>(), sources()).prop_map(|(owner, has_claims, sources)| World {
            owner,
            has_claims,
            ..World::of(sources)
        });
    world.prop_flat_map(|world| {
        let order: Vec<_> = (0..world.sources.len()).collect();
        (Just(world), Just(order).prop_shuffle())
    })
}

proptest! {
    #[test]
    fn name_owner_ignores_source_order((world, order) in worlds()) {
        let forward: Vec<_> = (0..world.sources.len()).collect();
        let may_have = |facts: &&SourceFacts| facts.grant != Fact::Is(other_name());
        let granted: Vec<_> = world.sources.iter().filter(|facts| facts.grant == Fact::Is(name())).collect();
        let is_owned = world.owner.is_some() && {
            let others: Vec<_> = world.sources.iter().collect();
            let known = Known {
                owner: world.owner.as_ref(),
                has_claims: world.has_claims,
                others,
                is_served: false,
                is_listed: true,
                is_late: false,
                plugins_may_come: false,
                reserved: None,
            };
            presence(world.owner.as_ref().unwrap(), &name(), &known) == Presence::Here
        };
        // Of new names, and of two grants, the first counts.
        let is_decided = is_owned && granted.len() <= 1 || granted.len() == 1;
        if is_decided {
            prop_assert_eq!(world.clone().settle(&order), world.clone().settle(&forward));
        }
        let owner = world.clone().settle(&order);
        if let [only] = granted.as_slice() {
            prop_assert_eq!(&owner, &only.source);
        } else if is_owned && granted.is_empty() {
            let Some(NameOwner::Source(before)) = world.owner.clone() else { unreachable!() };
            prop_assert_eq!(owner, Some(before));
        } else if world.sources.iter().any(|facts| may_have(&facts)) && !is_owned {
            prop_assert!(owner.is_some(), "a free name goes to a source that may have it");
        }
    }

    #[test]
    fn claimed_name_requires_a_grant((world, _) in worlds()) {
        let world = world.with_claims();
        let Some(NameOwner::Source(owner)) = world.owner.clone() else { return Ok(()) };
        for (at, facts) in world.sources.iter().enumerate() {
            if facts.source.as_ref() != Some(&owner) && facts.grant != Fact::Is(name()) {
                prop_assert!(matches!(world.ask(at), Decision::Refused(_)), "{:?}", facts);
            }
        }
    }
}
