//! Tests of allocations over whole inventories, rule by rule.

mod constraints;
mod fixtures;
mod history;
mod pools;
mod requests;
mod results;
mod searches;
mod sharing;
