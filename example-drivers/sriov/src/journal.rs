//! Changes that a claim made on the node: its memo, and the progress of a prepare that did not succeed.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_sdk::{ClaimRecord, Context, Host, Problem};
use serde::{Deserialize, Serialize};

use nodedock_sdk::pci::Address;

/// Virtual functions that this driver created.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Made {
    pub(crate) count: u32,
    /// `sriov_drivers_autoprobe` before, if the driver changed it.
    pub(crate) autoprobe_before: Option<String>,
}

/// Network interface of a virtual function. It is not visible on the node while a container has it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) hardware_address: String,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Journal {
    boot_id: String,
    /// Physical functions whose virtual functions this driver created, if the claim uses one of them.
    pub(crate) made: BTreeMap<Address, Made>,
    /// Virtual functions that the claim binds.
    pub(crate) bound: BTreeSet<Address>,
    /// Interfaces by virtual function.
    pub(crate) interfaces: BTreeMap<Address, Interface>,
}

impl Journal {
    pub(crate) fn new(ctx: &Context) -> Self {
        Journal {
            boot_id: ctx.boot_id.clone(),
            ..Self::default()
        }
    }

    /// Returns what was saved in this boot: a boot removes virtual functions.
    pub(crate) fn of_this_boot(ctx: &Context, saved: Option<Self>) -> Self {
        saved
            .filter(|journal| journal.boot_id == ctx.boot_id)
            .unwrap_or_else(|| Self::new(ctx))
    }

    /// Returns the journal of a claim: its memo and its progress.
    pub(crate) fn of(ctx: &Context, record: &ClaimRecord) -> Result<Self, Problem> {
        let mut journal = Self::of_this_boot(ctx, record.claim.progress()?);
        let memo = Self::of_this_boot(ctx, record.memo()?);
        journal.made.extend(memo.made);
        journal.bound.extend(memo.bound);
        journal.interfaces.extend(memo.interfaces);
        Ok(journal)
    }

    /// Returns whether there is nothing to undo.
    pub(crate) fn changes_nothing(&self) -> bool {
        self.made.is_empty() && self.bound.is_empty()
    }
}

/// Returns the virtual functions that this driver created and that claims other than `except` use, by physical function.
pub(crate) fn made_for_others(
    host: &Host,
    ctx: &Context,
    except: &BTreeSet<&str>,
) -> Result<BTreeMap<Address, Made>, Problem> {
    let mut made = BTreeMap::new();
    for record in host.prepared_claims().all() {
        if !except.contains(record.claim.id.uid.as_str()) {
            made.extend(Journal::of(ctx, &record)?.made);
        }
    }
    Ok(made)
}
