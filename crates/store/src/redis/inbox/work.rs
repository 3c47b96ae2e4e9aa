//! Work that runs inside the script that makes the mark.

use super::super::RedisStore;
use super::super::script::script;
use super::{MOST, Told, columns, receipt, word};
use crate::{Arrival, Error, InboxRules, Receipt, Work};

/// What a store on Redis says of SQL.
const NO_SQL: &str =
    "a store on Redis runs no SQL: give this consumer a `script`, `http` or `command` handler";

script!(
    PROCESS: "../prelude.lua", "../append.lua", "../send.lua", "../acknowledge.lua", "desk.lua", "process.lua"
);
script!(CHECK: "../prelude.lua", "check.lua");

impl RedisStore {
    pub(super) async fn check_work(&self, work: &Work) -> Result<(), Error> {
        match work {
            Work::Mark => Ok(()),
            Work::Sql(_) => Err(Error::Refused(NO_SQL.to_owned())),
            Work::Script(code) => {
                let mut call = self.script(&CHECK);
                call.arg(code);
                match self.read(&call).await?.text()?.as_str() {
                    "" => Ok(()),
                    wrong => Err(Error::Refused(format!(
                        "the handler's script does not compile: {wrong}; it is Lua 5.1 and sees the table `message`"
                    ))),
                }
            }
        }
    }

    pub(super) async fn work(
        &self,
        group: &str,
        arrivals: &[Arrival],
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let (kind, code) = match work {
            Work::Mark => ("mark", ""),
            Work::Script(code) => ("script", code.as_str()),
            Work::Sql(_) => return Err(Error::Refused(NO_SQL.to_owned())),
        };
        let mut receipts: Vec<Receipt> = Vec::with_capacity(arrivals.len());
        for part in arrivals.chunks(MOST) {
            if let Some(unavailable @ Receipt::Unavailable { .. }) = receipts.last().cloned() {
                receipts.extend(part.iter().map(|_| unavailable.clone()));
                continue;
            }
            let mut call = self.desk(&PROCESS, group, rules);
            call.arg(kind).arg(code);
            let arrivals: Vec<_> = part.iter().map(|arrival| (arrival, Told::Whole)).collect();
            columns(&mut call, &arrivals, |_| {});
            for answer in self.write(&call).await? {
                receipts.push(receipt(word(answer)?)?);
            }
        }
        if kind == "script" {
            // It may have sent something.
            self.ring();
        }
        Ok(receipts)
    }
}
